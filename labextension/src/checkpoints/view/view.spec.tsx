import { nullTranslator } from '@jupyterlab/translation';
import { Signal } from '@lumino/signaling';
import React, { act } from 'react';
import { type Root, createRoot } from 'react-dom/client';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { aCheckpoint, damaged } from '../../testing/checkpoints';
import type { Checkpoint } from '../../api/tokens';
import type { CheckpointActions } from '../actions';
import type { INotebook } from '../list';
import type { IDoing } from '../store';
import { type IView, View } from './view';

const tea = aCheckpoint({
  name: 'tea',
  created: '2026-01-01T16:00:00.000+00:00',
  path: 'other.ipynb',
  kernel_id: 'kernel-2'
});

let node: HTMLElement;
let root: Root;
let all: Checkpoint[];
let current: INotebook | null;
let store: Record<string, unknown>;
let doing: Record<string, IDoing>;
let actions: Record<'restore' | 'restoreIntoNew' | 'delete', ReturnType<typeof vi.fn>>;

beforeEach(() => {
  vi.stubGlobal('IS_REACT_ACT_ENVIRONMENT', true);
  node = document.body.appendChild(document.createElement('div'));
  root = createRoot(node);
  all = [tea, aCheckpoint(), damaged];
  current = { path: 'lessons/train.ipynb', kernelId: 'kernel-1' };
  doing = {};
  store = { isReady: true, problem: '', working: null, arriving: [] };
  actions = {
    restore: vi.fn(async () => undefined),
    restoreIntoNew: vi.fn(async () => undefined),
    delete: vi.fn(async (checkpoints: Checkpoint[]) => {
      all = all.filter(each => !checkpoints.includes(each));
      return true;
    })
  };
});

afterEach(async () => {
  await act(async () => root.unmount());
  node.remove();
  vi.unstubAllGlobals();
});

async function render(): Promise<void> {
  const view: IView = {
    store: { ...store, all, doing: (name: string) => doing[name] ?? null } as never,
    actions: actions as unknown as CheckpointActions,
    notebooks: { current, changed: new Signal({}) } as never,
    openNotebook: vi.fn(),
    make: null,
    trans: nullTranslator.load('')
  };
  await act(async () => root.render(<View {...view} />));
}

const rows = () => [...node.querySelectorAll<HTMLElement>('tr[data-name]')];
const names = () => rows().map(each => each.dataset.name);
const row = (name: string) => rows().find(each => each.dataset.name === name)!;
const focused = () => (document.activeElement as HTMLElement).dataset.name;
const button = (name: string) => node.querySelector<HTMLButtonElement>(`[aria-label="${name}"]`)!;

async function press(...keys: string[]): Promise<void> {
  for (const key of keys) {
    await act(async () => {
      document.activeElement!.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
    });
  }
}

test('the view is a tree grid with one row in the tab order', async () => {
  await render();
  expect(node.querySelector('table')!.getAttribute('role')).toBe('treegrid');
  expect(names()).toEqual(['tea', 'before-lunch', 'torn']);
  expect(rows().map(each => each.tabIndex)).toEqual([0, -1, -1]);
  expect(row('tea').getAttribute('aria-expanded')).toBe('false');
  expect(row('tea').getAttribute('aria-label')).toMatch(
    /^tea, 2 variables and 1 file, 1 not saved, .* in other.ipynb, You, Whole process, /
  );
  expect(node.querySelector('th[aria-sort="descending"]')!.textContent).toBe('Created');
});

test('arrow keys move between rows, Enter expands a row, Delete deletes it', async () => {
  await render();
  await act(async () => row('tea').focus());
  await press('ArrowDown', 'ArrowDown', 'ArrowDown');
  expect(focused()).toBe('torn');
  await press('ArrowUp', 'Enter');
  expect(row('before-lunch').getAttribute('aria-expanded')).toBe('true');
  expect(node.querySelector('.jp-Sing-details')!.textContent).toContain('a generator');
  await press('ArrowLeft');
  expect(node.querySelector('.jp-Sing-details')).toBeNull();
  await press('Delete');
  expect(actions.delete.mock.calls[0][0].map((each: Checkpoint) => each.name)).toEqual([
    'before-lunch'
  ]);
});

test('the focus moves to the next row after a deletion', async () => {
  await render();
  await act(async () => row('tea').focus());
  await press('Delete');
  await render();
  expect(names()).toEqual(['before-lunch', 'torn']);
  expect(focused()).toBe('before-lunch');
});

test('selected checkpoints are deleted together', async () => {
  await render();
  await act(async () => row('tea').focus());
  await press(' ', 'ArrowDown', ' ', 'Delete');
  expect(actions.delete.mock.calls[0][0]).toHaveLength(2);
  expect(node.querySelector('[role="status"]')!.textContent).toContain('2 selected');
});

test('a click on a column header sorts by it', async () => {
  await render();
  const [byName] = node.querySelectorAll<HTMLButtonElement>('th button');
  await act(async () => byName.click());
  expect(names()).toEqual(['before-lunch', 'tea', 'torn']);
  await act(async () => byName.click());
  expect(names()).toEqual(['torn', 'tea', 'before-lunch']);
});

test('the list can be limited to the current notebook', async () => {
  await render();
  const only = node.querySelector<HTMLInputElement>('.jp-Sing-checkpointsHere input')!;
  await act(async () => only.click());
  expect(names()).toEqual(['before-lunch']);
  current = { path: 'nothing.ipynb', kernelId: null };
  await render();
  expect(names()).toEqual([]);
  expect(node.textContent).toContain('No checkpoint of this notebook yet');
});

test('restore targets the current notebook, and is disabled without one', async () => {
  await render();
  button('Restore tea into train.ipynb').click();
  expect(actions.restore).toHaveBeenCalledWith(tea, current);
  current = null;
  await render();
  expect(button('First open the notebook into which to restore').disabled).toBe(true);
  button('Restore tea into a new notebook').click();
  expect(actions.restoreIntoNew).toHaveBeenCalledWith(tea);
});

test('a damaged checkpoint shows its problem, and can only be deleted', async () => {
  await render();
  expect(row('torn').textContent).toContain('Damaged: Its hash is wrong.');
  expect(row('torn').querySelectorAll('.jp-Sing-action')).toHaveLength(1);
});

test('work in progress is shown in its row, whose buttons are disabled', async () => {
  doing = { tea: { verb: 'restore', done: 0.25, isLong: true } };
  await render();
  const bar = row('tea').querySelector('[role="progressbar"]')!;
  expect(bar.getAttribute('aria-label')).toBe('Restoring');
  expect(bar.getAttribute('aria-valuenow')).toBe('25');
  expect(button('Delete tea').disabled).toBe(true);
});

test('a checkpoint that is being saved comes first', async () => {
  store.arriving = [{ name: 'new', session: 'lessons/train.ipynb' }];
  await render();
  const [first] = node.querySelectorAll('tbody tr');
  expect(first.textContent).toContain('new');
  expect(first.querySelector('[role="progressbar"]')!.getAttribute('aria-valuenow')).toBeNull();
});

test('an empty list has a notice, and a failed request an error', async () => {
  all = [];
  await render();
  expect(node.textContent).toContain('No checkpoint yet');
  store = { ...store, isReady: false, problem: 'The Jupyter server cannot be reached.' };
  await render();
  expect(node.textContent).not.toContain('No checkpoint yet');
  expect(node.querySelector('[role="status"]')!.textContent).toBe(
    'The Jupyter server cannot be reached.'
  );
});
