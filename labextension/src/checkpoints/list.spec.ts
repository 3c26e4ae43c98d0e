import { nullTranslator } from '@jupyterlab/translation';
import { expect, test } from 'vitest';
import { aCheckpoint, damaged } from '../testing/checkpoints';
import { NEWEST_FIRST, arranged, clicked, isOf } from './list';
import {
  contentsText,
  deletionTexts,
  formOutcomeText,
  formText,
  leftOutText,
  outcomeText,
  selectionText,
  sizeTitle,
  totalText
} from './texts';

const trans = nullTranslator.load('');
const ALL = { text: '', of: null };
const named = (names: string[], all = names.map(name => aCheckpoint({ name }))) => all;
const names = (checkpoints: { name: string }[]) => checkpoints.map(each => each.name);

const lunch = aCheckpoint();
const tea = aCheckpoint({
  name: 'tea',
  created: '2026-01-01T16:00:00.000+00:00',
  path: 'lessons/other.ipynb',
  kernel_id: 'kernel-2',
  automatic: true,
  forms: ['namespace'],
  exclusive: 5,
  files: 0,
  omitted: [],
  saved: [{ name: 'optimizer', kind: 'Adam', bytes: 8 }]
});

test('the newest checkpoint is first, and damaged ones are last in any order', () => {
  expect(names(arranged([lunch, damaged, tea], ALL, NEWEST_FIRST))).toEqual([
    'tea',
    'before-lunch',
    'torn'
  ]);
  const oldest = { key: 'created', descending: false } as const;
  expect(names(arranged([lunch, damaged, tea], ALL, oldest))).toEqual([
    'before-lunch',
    'tea',
    'torn'
  ]);
});

test('columns sort by their content', () => {
  const by = (key: 'name' | 'notebook' | 'how' | 'form' | 'size') =>
    names(arranged([lunch, tea], ALL, { key, descending: false }));
  expect(by('name')).toEqual(['before-lunch', 'tea']);
  expect(by('notebook')).toEqual(['tea', 'before-lunch']);
  expect(by('how')).toEqual(['before-lunch', 'tea']);
  expect(by('form')).toEqual(['tea', 'before-lunch']);
  expect(by('size')).toEqual(['tea', 'before-lunch']);
});

test('numbers in names count as numbers, and equal ones are sorted by name', () => {
  const all = named(['run-10', 'run-9', 'run-1']);
  expect(names(arranged(all, ALL, { key: 'name', descending: false }))).toEqual([
    'run-1',
    'run-9',
    'run-10'
  ]);
  expect(names(arranged(all, ALL, NEWEST_FIRST))).toEqual(['run-1', 'run-9', 'run-10']);
});

test('a click sorts by a column, and a second one reverses the order', () => {
  const bySize = clicked(NEWEST_FIRST, 'size');
  expect(bySize).toEqual({ key: 'size', descending: true });
  expect(clicked(bySize, 'size')).toEqual({ key: 'size', descending: false });
  expect(clicked(bySize, 'name')).toEqual({ key: 'name', descending: false });
});

test('the filter matches names, notebooks and variables', () => {
  const found = (text: string) => names(arranged([tea, lunch], { text, of: null }, NEWEST_FIRST));
  expect(found('LUNCH')).toEqual(['before-lunch']);
  expect(found('other.ipynb')).toEqual(['tea']);
  expect(found('tea optimizer')).toEqual(['tea']);
  expect(found('lunch optimizer')).toEqual([]);
  expect(found('  ')).toEqual(['tea', 'before-lunch']);
});

test('a checkpoint belongs to the notebook with its path or its kernel', () => {
  expect(isOf(lunch, { path: 'lessons/train.ipynb', kernelId: null })).toBe(true);
  expect(isOf(lunch, { path: 'renamed.ipynb', kernelId: 'kernel-1' })).toBe(true);
  expect(isOf(lunch, { path: 'renamed.ipynb', kernelId: 'kernel-2' })).toBe(false);
  expect(isOf(damaged, { path: '', kernelId: null })).toBe(false);
  const of = { path: 'lessons/other.ipynb', kernelId: null };
  expect(names(arranged([lunch, tea], { text: '', of }, NEWEST_FIRST))).toEqual(['tea']);
});

test('contents and omissions of a checkpoint are listed', () => {
  expect(contentsText(lunch, trans)).toBe('2 variables and 1 file');
  expect(contentsText(tea, trans)).toBe('1 variable');
  expect(contentsText(damaged, trans)).toBe('Damaged: Its hash is wrong.');
  expect(leftOutText(lunch, trans)).toBe('1 not saved');
  expect(leftOutText(tea, trans)).toBe('');
  expect([formText(lunch, trans), formText(tea, trans)]).toEqual(['Whole process', 'Variables']);
  expect(sizeTitle(lunch, trans)).toContain('Deleting it frees 1.0 MiB. It uses 2.0 MiB on disk');
  expect(totalText([lunch, tea, damaged], trans)).toBe('3 checkpoints');
  expect(selectionText([lunch, damaged], trans)).toBe('2 selected, deleting frees 1.0 MiB');
});

test('the deletion dialog shows how much space is freed, if known', () => {
  expect(deletionTexts([lunch], trans)).toEqual({
    title: 'Delete checkpoint before-lunch?',
    body: 'This frees 1.0 MiB. This cannot be undone.'
  });
  expect(deletionTexts([lunch, tea], trans).title).toBe('Delete 2 checkpoints?');
  expect(deletionTexts([lunch, tea], trans).body).toContain('at least');
  expect(deletionTexts([damaged], trans).body).toContain('its size is unknown');
});

test('the result of a restore shows notebook, form and omissions', () => {
  const whole = {
    checkpoint: 'before-lunch',
    variables: 2,
    files: 0,
    aside: {},
    problems: [],
    form: 'process' as const
  };
  expect(outcomeText(whole, 'train.ipynb', trans)).toBe(
    'Restored the process of before-lunch into train.ipynb, with 2 variables.'
  );
  const part = {
    ...whole,
    form: 'namespace' as const,
    why: 'CRIU is not installed.',
    files: 1,
    aside: { '/home/ada/table.csv': '/data/aside/table.csv' },
    problems: [{ name: 'frame', why: 'there is no module pandas', partly: false }]
  };
  expect(outcomeText(part, 'train.ipynb', trans)).toBe(
    'Restored 2 variables and 1 file from before-lunch into train.ipynb. 1 not restored. 1 file was renamed.'
  );
  expect(formOutcomeText(part, trans)).toContain('not the process: CRIU is not installed.');
});
