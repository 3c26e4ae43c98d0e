import { nullTranslator } from '@jupyterlab/translation';
import { expect, test } from 'vitest';
import { jobSentence, nameParts, placeText, ranksText, startedTexts } from './jobs';
import { aSession } from '../testing/sessions';

const trans = nullTranslator.load('');
const rank = (number: number, name = 'train.ipynb', device: string | null = `cuda:${number}`) =>
  aSession({
    id: `${name} ${number}`,
    name: `${name} rank ${number}`,
    kernel_id: '',
    parent: 'session-1',
    job: name,
    rank: number,
    ranks: 2,
    device
  });

test.each([
  ['train.py rank 12', ['train.py', ' rank 12']],
  ['train.py', ['train.py', '']],
  ['rank 1', ['rank 1', '']]
])('the name %s has the parts %j', (name, parts) => {
  expect(nameParts(name)).toEqual(parts);
});

test('a job says how many ranks it has, and where', () => {
  const ranks = [rank(0), rank(1)];
  expect(ranksText(ranks, trans)).toBe('2 ranks');
  expect(ranksText([ranks[1]], trans)).toBe('1 of 2 ranks');
  expect(placeText(ranks, trans)).toBe('on 2 GPUs');
  expect(placeText([ranks[1]], trans)).toBe('on GPU 1');
  expect(placeText([rank(0, 'a', null)], trans)).toBe('');
});

test('a job says how it runs, or what it waits for', () => {
  const waits = { ...rank(0), state: 'queued' as const, reason: 'It waits.' };
  const runs = { ...rank(1), state: 'running' as const, reason: 'Job of 2 ranks runs.' };
  expect(jobSentence([waits, runs], trans)).toBe('Job of 2 ranks runs.');
  expect(jobSentence([waits, waits], trans)).toBe('It waits.');
  expect(jobSentence([{ ...runs, reason: '' }], trans)).toBe('');
});

test('a session says what it has started: jobs by name if that is not its own', () => {
  const session = aSession();
  const program = aSession({ id: 'b', name: 'eval.py', kernel_id: '', parent: 'session-1' });
  const others = [rank(0), rank(1), rank(0, 'train.py'), program, aSession({ id: 'c' })];
  expect(startedTexts(session, [session, ...others], trans)).toEqual([
    '2 ranks on 2 GPUs',
    'train.py, 1 of 2 ranks on GPU 0',
    'eval.py on Simulated GPU 0'
  ]);
  expect(startedTexts(program, others, trans)).toEqual([]);
});
