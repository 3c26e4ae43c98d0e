import { nullTranslator } from '@jupyterlab/translation';
import { expect, test } from 'vitest';
import {
  checkpointText,
  devicesText,
  neighbours,
  queueText,
  waitingCount,
  withoutTurn
} from './facts';
import { aDevice, aSession } from '../testing/sessions';
import { deviceName, escaped, readable, sentenceBeside } from './words';

const trans = nullTranslator.load('');
const GB = 2 ** 30;

test('neighbours are sessions with memory on the device', () => {
  const session = aSession();
  const others = [
    session,
    aSession({ id: 'works', state: 'running', memory: 0 }),
    aSession({ id: 'rests', state: 'idle' }),
    aSession({ id: 'unused', state: 'idle', memory: 0 }),
    aSession({ id: 'away', state: 'suspended', memory: 0 }),
    aSession({ id: 'waits', state: 'queued', memory: 0 }),
    aSession({ id: 'elsewhere', device: 'cpu:1' })
  ];
  expect(neighbours(session, others).map(each => each.id)).toEqual(['works', 'rests']);
});

test.each([
  [1, 4.2, 'You are next, about 4 s'],
  [3, 120, 'Place 3 in the queue, about 2 min'],
  [1, 0.4, 'You are next, any moment now'],
  [1, -2, 'You are next, any moment now'],
  [1, -4, 'You are next; this takes longer than expected'],
  [2, null, 'Place 2 in the queue']
])('place %s with %s s left reads: %s', (position, left, text) => {
  expect(queueText(position, left, trans)).toBe(text);
});

test('the last checkpoint is shown with its time, and with its date unless it is today', () => {
  const now = new Date(2026, 10, 22, 12, 0);
  const made = (created: Date, overrides: object = {}) => {
    const last = { name: 'a', automatic: true, earlier: false, died: false, ...overrides };
    const session = aSession({ last_checkpoint: { ...last, created: created.toISOString() } });
    return checkpointText(session, now, 'en-GB', trans);
  };
  expect(made(new Date(2026, 10, 22, 10, 42))).toBe('Last checkpoint: 10:42, automatic');
  expect(made(new Date(2026, 10, 20, 10, 42), { automatic: false, earlier: true })).toBe(
    'Last checkpoint: 20 Nov 2026, 10:42, by you, from an earlier kernel'
  );
  expect(checkpointText(aSession(), now, 'en-GB', trans)).toBe('No checkpoint yet');
});

test('memory use of devices is shown with the number of waiting sessions', () => {
  const memory = { memory_used: 12 * GB, memory_total: 80 * GB };
  const device = aDevice({ id: 'cuda:1', kind: 'cuda', ...memory });
  expect(devicesText([device], 0, trans)).toBe('GPU 1: 12.0 GiB of 80.0 GiB');
  expect(devicesText([device], 2, trans)).toBe('GPU 1: 12.0 GiB of 80.0 GiB · 2 waiting');
  const other = { ...device, id: 'cuda:0', memory_used: GB };
  expect(devicesText([other, device], 1, trans)).toBe('2 GPUs: 13.0 GiB of 160.0 GiB · 1 waiting');
  const software = aDevice({ memory_used: GB, memory_total: 2 * GB });
  expect(devicesText([other, software], 0, trans)).toBe('2 GPUs: 2.0 GiB of 82.0 GiB');
});

test('queued sessions wait for their device', () => {
  const sessions = [
    aSession({ state: 'queued' }),
    aSession({ state: 'queued', device: 'cpu:1' }),
    aSession({ state: 'suspended' })
  ];
  expect(waitingCount(sessions)).toBe(2);
  expect(waitingCount(sessions, aDevice())).toBe(1);
});

test('a sentence beside its word and turn repeats neither', () => {
  const sentence = 'Waiting for Simulated GPU 0 (in use by bob). You are next, about 1 s.';
  expect(withoutTurn(sentence)).toBe('Waiting for Simulated GPU 0 (in use by bob).');
  expect(withoutTurn('Waiting for GPU 1. Place 12 in the queue, about 3 min.')).toBe(
    'Waiting for GPU 1.'
  );
  expect(sentenceBeside('Idle', 'Idle. Suspends at 09:12; nothing is lost.')).toBe(
    'Suspends at 09:12; nothing is lost.'
  );
  expect(sentenceBeside('Running', 'Running on the GPU.')).toBe('Running on the GPU.');
});

test.each([
  ['Idle. Suspends at %; nothing is lost.', new Date(2026, 10, 23, 9, 12), '09:12'],
  ['Paused by root, %, in the middle of a cell.', new Date(2026, 10, 23, 0, 5), '00:05'],
  ['Suspends at %.', new Date(2026, 10, 24, 9, 12), '24 Nov 2026, 09:12']
])('moments in a sentence are in the time of the browser: %s', (text, moment, clock) => {
  const now = new Date(2026, 10, 23, 8, 0);
  const sentence = text.replace('%', moment.toISOString().replace(':00.000Z', 'Z'));
  expect(readable(sentence, now, 'en-GB')).toBe(text.replace('%', clock));
  expect(readable(text.replace('%', moment.toISOString()), now, 'en-GB')).toContain(clock);
});

test.each([
  ['cuda:1', 'GPU 1'],
  ['cpu:0', 'Simulated GPU 0'],
  ['other', 'other']
])('device %s is shown as %s', (id, name) => {
  expect(deviceName(id)).toBe(name);
});

test.each([
  ['実験\u30001.ipynb', '実験\u30001.ipynb'],
  ['👨\u200d👧 nb\u00a0.ipynb', '👨\u200d👧 nb\u00a0.ipynb'],
  ['rtl\u202egnp.ipynb', 'rtl\\u202egnp.ipynb'],
  ['\u001b[31mred\u0007\udcff', '\\x1b[31mred\\x07\\udcff']
])('the name %j is shown as %j', (name, shown) => {
  expect(escaped(name)).toBe(shown);
});
