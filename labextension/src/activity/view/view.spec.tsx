import { nullTranslator } from '@jupyterlab/translation';
import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';
import { act } from 'react';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { aDay } from '../../testing/activity';
import type { ISingModel } from '../../api/tokens';
import type { Activity } from '../data/data';
import { ActivityPoller } from '../data/activitypoller';
import { ActivityPanel, INITIAL, viewState } from './view';

let answer: () => Promise<Activity>;
let panel: ActivityPanel;
let opened: string[];

beforeEach(() => {
  vi.stubGlobal('IS_REACT_ACT_ENVIRONMENT', true);
  vi.stubGlobal(
    'IntersectionObserver',
    class {
      observe(): void {}
      disconnect(): void {}
    }
  );
  vi.stubGlobal('requestIdleCallback', (call: () => void) => window.setTimeout(call, 0));
  vi.stubGlobal('CSS', { escape: (text: string) => text });
  vi.spyOn(HTMLCanvasElement.prototype, 'getContext').mockReturnValue(null);
  // Open spans show their duration, which must not change during a test.
  vi.useFakeTimers({
    now: 1_800_000_000_000,
    toFake: ['Date', 'setTimeout', 'clearTimeout', 'setInterval', 'clearInterval']
  });
  const day = aDay({ until: Date.now() / 1000, devices: 2, spanCount: 60 });
  answer = async () => day;
});

afterEach(() => {
  act(() => panel.dispose());
  vi.useRealTimers();
  vi.restoreAllMocks();
  vi.unstubAllGlobals();
});

async function shown(state = INITIAL): Promise<HTMLElement> {
  const model = { changed: new Signal({}), devices: [] } as unknown as ISingModel;
  opened = [];
  panel = new ActivityPanel({
    poller: new ActivityPoller({ activity: () => answer() as never }, model),
    model,
    state,
    translator: nullTranslator,
    themes: null,
    onOpen: session => opened.push(session)
  });
  await act(async () => {
    Widget.attach(panel, document.body);
    await vi.advanceTimersByTimeAsync(100);
  });
  return panel.node;
}

async function press(key: string): Promise<void> {
  await act(async () => {
    document.activeElement!.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
  });
}

function sentence(): string {
  return panel.node.querySelector('[aria-live]')!.textContent!;
}

test('arrow keys step through a device, and its entries are announced', async () => {
  const node = await shown({ ...INITIAL, seconds: 86_400 });
  const plots = node.querySelectorAll<HTMLElement>('[data-device]');
  expect(plots).toHaveLength(2);
  plots[0].focus();
  await press('End');
  const last = sentence();
  expect(last).toMatch(/GPU 0|\d\d:\d\d/);
  await press('ArrowLeft');
  expect(sentence()).not.toBe(last);
  await press('ArrowRight');
  expect(sentence()).toBe(last);
  await press('Enter');
  expect(opened).toHaveLength(1);
  await press('ArrowDown');
  expect(document.activeElement).toBe(plots[1]);
});

test('keys zoom and move, and the shown time is saved', async () => {
  const node = await shown();
  node.querySelector<HTMLElement>('[role=slider]')!.focus();
  await press('+');
  expect(panel.state).toEqual({ seconds: 1800, end: null, isTable: false });
  await press('ArrowLeft');
  expect(panel.state.end).not.toBeNull();
});

test('the record is also shown as a table', async () => {
  const node = await shown({ ...INITIAL, isTable: true, seconds: 86_400 });
  const [devices, entries] = node.querySelectorAll('table');
  expect(devices.querySelectorAll('tbody tr')).toHaveLength(2);
  expect(entries.querySelectorAll('tbody tr').length).toBeGreaterThan(50);
});

test('a failure is shown with a retry button', async () => {
  const day = answer;
  answer = () => Promise.reject(new Error('The Jupyter server cannot be reached.'));
  const node = await shown();
  expect(node.querySelector('[role=alert]')!.textContent).toContain('cannot be reached');
  answer = day;
  await act(async () => {
    node.querySelector<HTMLElement>('[role=alert] button')!.click();
    await vi.advanceTimersByTimeAsync(100);
  });
  expect(node.querySelectorAll('[data-device]')).toHaveLength(2);
});

test('an empty record has a notice', async () => {
  const day = await answer();
  const devices = day.devices.map(device => ({ ...device, held: [] }));
  answer = async () => ({ ...day, devices, events: [] });
  const node = await shown();
  expect(node.textContent).toContain('No GPU was used in the last 24 hours.');
});

test.each([
  [{}, INITIAL],
  [
    { seconds: 300, end: 5, isTable: true },
    { seconds: 300, end: 5, isTable: true }
  ],
  [{ seconds: -1, end: 'x', isTable: 1 }, INITIAL]
])('a saved layout %j is restored as %j', (saved, state) => {
  expect(viewState(saved)).toEqual(state);
});
