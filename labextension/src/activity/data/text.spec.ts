import { nullTranslator } from '@jupyterlab/translation';
import { expect, test } from 'vitest';
import { Clock, itemFacts, itemSentence, memoryText, spanFacts } from './text';

const trans = nullTranslator.load('');
const clock = new Clock('en-GB');
const noon = new Date(2026, 10, 21, 12, 0, 0).getTime() / 1000;
const span = {
  session: 's',
  name: 'lessons/train.ipynb',
  owner: 'ada',
  device: 'cuda:0',
  state: 'running' as const,
  start: noon,
  end: noon + 90
};

test.each([
  [12, 80, '12.0 GiB of 80.0 GiB'],
  [1.24, 2, '1.2 GiB of 2.0 GiB'],
  [0, 80, '0 B of 80.0 GiB'],
  [0.5, 1, '512.0 MiB of 1.0 GiB']
])('%f of %i GiB read %s', (used, total, text) => {
  expect(memoryText(used * 2 ** 30, total * 2 ** 30)).toBe(text);
});

test('a range has its date once, or twice if the dates differ', () => {
  expect(clock.range({ start: noon, end: noon + 3600 })).toMatch(/21 Nov, 12:00 – 13:00$/);
  expect(clock.range({ start: noon, end: noon + 60 })).toMatch(/12:00:00 – 12:01:00$/);
  expect(clock.range({ start: noon, end: noon + 86_400 })).toMatch(
    /21 Nov, 12:00 – .*22 Nov, 12:00$/
  );
});

test.each([
  [60, true, /21 Nov/],
  [60, false, /^12:00$/],
  [30, false, /^12:00:00$/]
])('a tick every %i s (new day: %s) reads %s', (seconds, isDay, text) => {
  expect(clock.tick({ at: noon, isDay }, seconds)).toMatch(text);
});

test('an open span reads since, and an ended one from and to', () => {
  expect(spanFacts(span, noon + 90, noon + 100, clock, trans)).toEqual({
    name: 'train.ipynb',
    owner: 'ada',
    state: 'Running',
    time: 'since 12:00:00',
    duration: '2 min'
  });
  expect(spanFacts(span, noon + 900, noon + 900, clock, trans).time).toBe('12:00:00 – 12:01:30');
});

test('a span is one sentence, without the owner if that is hidden', () => {
  const item = { type: 'span' as const, span, start: noon };
  expect(itemSentence(item, 'cuda:0', noon + 900, noon + 900, clock, trans)).toBe(
    'train.ipynb of ada: Running on GPU 0, 12:00:00 – 12:01:30, 2 min.'
  );
  const other = { ...item, span: { ...span, name: '' } };
  expect(itemSentence(other, 'cpu:1', noon + 900, noon + 900, clock, trans)).toMatch(
    /^Session of ada: Running on Simulated GPU 1/
  );
});

test('an event shows its kind and the text of the server', () => {
  const event = { ...span, at: noon, kind: 'swapped_out' as const, text: 'Others need it.' };
  const item = { type: 'event' as const, event, start: noon };
  expect(itemSentence(item, 'cuda:0', noon, noon, clock, trans)).toBe(
    'Moved to disk: train.ipynb, 12:00:00. Others need it.'
  );
  expect(itemFacts(item, trans)).toEqual({ word: 'Moved to disk', text: 'Others need it.' });
});
