import { CommandRegistry } from '@lumino/commands';
import { DisposableDelegate } from '@lumino/disposable';
import { MessageLoop } from '@lumino/messaging';
import { nullTranslator } from '@jupyterlab/translation';
import { Panel, Widget } from '@lumino/widgets';
import React from 'react';
import { createRoot, type Root } from 'react-dom/client';
import { flushSync } from 'react-dom';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { RunningDevices, whileVisible } from './running';
import { FakeModel } from '../testing/model';
import { aDevice, aSession } from '../testing/sessions';
import { CommandIDs } from '../api/tokens';

const trans = nullTranslator.load('jupyter_sing');

let model: FakeModel;
let manager: RunningDevices;
let executed: ReturnType<typeof vi.fn>;
let root: Root;
let place: HTMLElement;

beforeEach(() => {
  model = new FakeModel([aDevice(), aDevice({ id: 'cuda:1', sessions: [] })], [aSession()]);
  const commands = new CommandRegistry();
  executed = vi.fn();
  for (const id of [CommandIDs.suspend, CommandIDs.resume, CommandIDs.openNotebook]) {
    commands.addCommand(id, { execute: args => executed(id, args) });
  }
  manager = new RunningDevices(commands, model, trans);
  place = document.body.appendChild(document.createElement('div'));
  root = createRoot(place);
});

afterEach(() => {
  flushSync(() => root.unmount());
  document.body.replaceChildren();
});

type Items = ReturnType<RunningDevices['running']>;

/** All items as JupyterLab nests them. */
function render(items: Items = manager.running({ mode: 'tree' })): void {
  const elements = (found: Items): React.ReactNode =>
    found.map((each, index) => (
      <div
        key={index}
        className={`jp-RunningSessions-item ${each.className}`}
        data-context={each.context}
      >
        <span onClick={each.open && (() => each.open!())}>{each.label()}</span>
        {each.children && elements(each.children)}
      </div>
    ));
  flushSync(() => root.render(elements(items)));
}

/** Visible text of an item, without the texts for screen readers. */
const row = (id: string) => place.querySelector(`[data-context="${id}"] .jp-Sing-row`)!;
const part = (id: string, name: string) =>
  row(id).querySelector(`.jp-Sing-row${name}`)?.textContent ?? null;
const button = (id: string) => row(id).querySelector('button');

test.each([
  ['running', {}, 'Running', 'Suspend train.ipynb'],
  ['idle', {}, 'Idle', 'Suspend train.ipynb'],
  ['queued', { queue_position: 2 }, 'Queued, place 2', 'Suspend train.ipynb'],
  ['suspended', { memory: 0 }, 'Suspended', 'Resume train.ipynb'],
  ['restoring', {}, 'Restoring', null],
  ['migrating', {}, 'Migrating', null],
  ['failed', {}, 'Error', null]
] as const)(
  'a session that is %s %j reads %s, and its button %s',
  (state, overrides, word, label) => {
    model.put(aSession({ state, ...overrides, reason: 'This happens next.' }));
    render();
    expect(part('session-1', 'Name')).toBe('train.ipynb');
    expect(part('session-1', 'Word')).toBe(word);
    expect(part('session-1', 'Next')).toBe('This happens next.');
    expect(part('session-1', 'Memory')).toBe(state === 'suspended' ? '' : '256.0 MiB');
    expect(button('session-1')?.getAttribute('aria-label') ?? null).toBe(label);
    expect(row('session-1').querySelector('svg path')?.getAttribute('d')).toBeTruthy();
  }
);

test('a device shows its memory use and the number of waiting sessions', () => {
  model.sessions = [aSession(), aSession({ id: 'session-2', state: 'queued', name: 'b.ipynb' })];
  model.changed.emit();
  render();
  expect(part('cpu:0', 'Name')).toBe('Simulated GPU 0');
  expect(part('cpu:0', 'Occupancy')).toBe('256.0 MiB of 2.0 GiB');
  expect(part('cpu:0', 'Waiting')).toContain('1 waiting');
  expect(row('cpu:0').querySelector('[role=meter]')?.getAttribute('aria-valuenow')).toBe('13');
  expect(part('cuda:1', 'Name')).toBe('GPU 1');
  expect(part('cuda:1', 'Waiting')).toBeNull();
});

test('a device that failed is out of use, and says why', () => {
  const failure = 'GPU 0 is out of use: it fell off the bus.';
  model.devices = [aDevice({ failure })];
  model.changed.emit();
  render();
  expect(part('cpu:0', 'Failure')).toBe('Out of use');
  expect(row('cpu:0').querySelector('.jp-Sing-rowFailure')?.getAttribute('title')).toBe(failure);
});

test('processes outside of sessions are below their device, with their user and memory', () => {
  const process = { pid: 7, user: 'bob', command: 'python train.py', memory: 2 ** 30 };
  const processes = [process, { pid: 1, user: 'ada', command: 'python -m kernel', memory: null }];
  const outside = { memory: 2 ** 31, contexts: 0, complete: true, processes };
  model.devices = [aDevice({ outside }), aDevice({ id: 'cuda:1' })];
  model.changed.emit();
  render();
  const below = manager.running({ mode: 'tree' })[0].children?.map(each => each.context);
  expect(below).toEqual(['session-1', 'outside cpu:0 7', 'outside cpu:0 1']);
  expect(part('outside cpu:0 7', 'Name')).toBe('python train.py');
  expect(part('outside cpu:0 7', 'Owner')).toBe('bob');
  expect(part('outside cpu:0 7', 'Word')).toBe('Outside');
  expect(part('outside cpu:0 7', 'Memory')).toBe('1.0 GiB');
  expect(part('outside cpu:0 7', 'Next')).toBe(
    '1.0 GiB is used outside of sessions, by process 7.'
  );
  // The kernel of a session that also opened the GPU itself; the driver does not tell its memory.
  expect(part('outside cpu:0 1', 'Name')).toBe('train.ipynb');
  expect(part('outside cpu:0 1', 'Next')).toBe('Memory is used outside of sessions, by process 1.');
  expect(button('outside cpu:0 7')).toBeNull();
});

test('memory outside of sessions is shown without processes if the driver names none', () => {
  const outside = { memory: 2 ** 30, contexts: 0, complete: false, processes: [] };
  model.devices = [aDevice({ outside })];
  model.changed.emit();
  render();
  expect(part('outside cpu:0', 'Name')).toBe('Others');
  expect(part('outside cpu:0', 'Next')).toContain('the driver does not say by whom');
});

test('sessions are below their device; those without a device are last', () => {
  model.sessions = [
    aSession({ id: 'c', device: null }),
    aSession({ id: 'b', device: 'cuda:1', state: 'suspended', name: 'z.ipynb' }),
    aSession({ id: 'a', device: 'cuda:1', name: 'a.ipynb' })
  ];
  model.changed.emit();
  const tree = manager.running({ mode: 'tree' });
  expect(tree.map(each => [each.context, each.children?.map(child => child.context)])).toEqual([
    ['cpu:0', []],
    ['cuda:1', ['a', 'b']],
    ['c', undefined]
  ]);
  const list = manager.running({ mode: 'list' });
  expect(list.map(each => each.context)).toEqual(['a', 'b', 'c']);
  render(list);
  expect(part('a', 'Device')).toBe('GPU 1');
});

test('no action of the panel shuts a kernel down', () => {
  const all = manager.running({ mode: 'tree' }).flatMap(each => [each, ...(each.children ?? [])]);
  expect(all.map(each => each.shutdown)).toEqual(all.map(() => undefined));
});

test('the button suspends or resumes, and a click beside it opens the notebook', () => {
  render();
  button('session-1')!.click();
  expect(executed.mock.calls).toEqual([[CommandIDs.suspend, { session: 'session-1' }]]);
  row('session-1').querySelector<HTMLElement>('.jp-Sing-rowName')!.click();
  expect(executed).toHaveBeenLastCalledWith(CommandIDs.openNotebook, { session: 'session-1' });
});

test('Enter opens the notebook of the item that has the focus, and leaves buttons alone', async () => {
  render();
  await new Promise(done => setTimeout(done)); // effects
  const item = place.querySelector<HTMLElement>('[data-context="session-1"]')!;
  const taken = vi.fn();
  place.addEventListener('keydown', taken);
  button('session-1')!.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', bubbles: true }));
  expect(taken).not.toHaveBeenCalled();
  expect(executed).not.toHaveBeenCalled();
  item.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', bubbles: true }));
  expect(executed.mock.calls).toEqual([[CommandIDs.openNotebook, { session: 'session-1' }]]);
});

const rank = (number: number, overrides = {}) =>
  aSession({
    id: `r${number}`,
    name: `train.py rank ${number}`,
    kernel_id: '',
    job: 'run',
    rank: number,
    ranks: 3,
    ...overrides
  });

/** The texts of the rows of jobs: their ids are no selectors. */
const jobs = () =>
  [...place.querySelectorAll('.jp-Sing-jobItem > span > .jp-Sing-row')].map(
    each => each.textContent
  );
const depths = (items: Items, depth = 0): string[] =>
  items.flatMap(each => {
    const name = each.className === 'jp-Sing-jobItem' ? 'job' : each.context;
    return [`${'-'.repeat(depth)}${name}`, ...depths([...(each.children ?? [])], depth + 1)];
  });
const tree = () => depths(manager.running({ mode: 'tree' }));

test('ranks are below a row of their job, in order', () => {
  model.devices = [aDevice()];
  model.sessions = [2, 0, 1].map(each => rank(each));
  model.changed.emit();
  render();
  expect(jobs()).toEqual(['train.py3 ranks on Simulated GPU 0768.0 MiB']);
  expect(tree()).toEqual(['cpu:0', '-job', '--r0', '--r1', '--r2']);
  expect(part('r1', 'Rank')).toBe('Rank 1');
  expect(part('r1', 'Device')).toBe('Simulated GPU 0');
  expect(button('r1')?.getAttribute('aria-label')).toBe('Suspend train.py rank 1');
});

test('a job on several devices is listed once, and devices say how many ranks they have', () => {
  model.sessions = [0, 1, 2].map(each => rank(each, { device: each === 1 ? 'cuda:1' : 'cpu:0' }));
  model.changed.emit();
  render();
  expect(tree()).toEqual(['cpu:0', '-job', 'cuda:1', '-job', 'job', '-r0', '-r1', '-r2']);
  expect(jobs()).toEqual([
    'train.py2 of 3 ranks512.0 MiB',
    'train.py1 of 3 ranks256.0 MiB',
    'train.py3 ranks on 2 GPUs768.0 MiB'
  ]);
});

test('what a notebook has started is below it; its job also with ranks on other devices', () => {
  const started = { parent: 'session-1' };
  model.sessions = [
    aSession(),
    rank(0, started),
    rank(1, started),
    rank(2, { ...started, device: 'cuda:1' }),
    aSession({ id: 'below', name: 'eval.py', kernel_id: '', parent: 'r1' }),
    aSession({ id: 'apart', name: 'other.py', kernel_id: '', ...started, device: 'cuda:1' })
  ];
  model.changed.emit();
  const expected = ['cpu:0', '-session-1', '--job', '---r0', '---r1', '----below', '---r2'];
  expect(tree()).toEqual([...expected, 'cuda:1', '-apart', '-job']);
  const list = manager.running({ mode: 'list' });
  expect(list.map(each => each.context)).toEqual(['session-1', 'r0', 'r1', 'below', 'r2', 'apart']);
  render(list);
  expect(part('r0', 'Name')).toBe('train.py rank 0');
});

test('ranks that are migrated between devices do not move', () => {
  model.sessions = [0, 1, 2].map(each => rank(each, { device: each === 1 ? 'cuda:1' : 'cpu:0' }));
  model.changed.emit();
  render();
  const moved = vi.fn();
  manager.runningChanged.connect(moved);
  flushSync(() => model.put(rank(2, { device: 'cuda:1' })));
  expect(moved).not.toHaveBeenCalled();
  expect(part('r2', 'Device')).toBe('GPU 1');
  expect(jobs()[1]).toBe('train.py2 of 3 ranks512.0 MiB');
});

test('a click on a job opens the notebook that has started it', () => {
  model.sessions = [aSession(), ...[0, 1, 2].map(each => rank(each, { parent: 'session-1' }))];
  model.changed.emit();
  render();
  place.querySelector<HTMLElement>('.jp-Sing-jobItem .jp-Sing-rowName')!.click();
  expect(executed.mock.calls).toEqual([[CommandIDs.openNotebook, { session: 'r0' }]]);
  model.sessions = [0, 1, 2].map(each => rank(each));
  model.changed.emit();
  expect(manager.running({ mode: 'tree' }).at(-1)?.open).toBeUndefined();
});

test('jobs of two notebooks are different ones, also if their ids are the same', () => {
  model.devices = [aDevice()];
  model.sessions = [rank(0, { parent: 'a', ranks: 2 }), rank(1, { parent: 'b', ranks: 2 })];
  model.changed.emit();
  render();
  expect(place.querySelectorAll('.jp-Sing-jobItem').length).toBe(2);
});

test('a rank changes on its own, and moves into its job when it reports it', () => {
  model.sessions = [0, 1, 2].map(each => rank(each));
  model.changed.emit();
  render();
  const moved = vi.fn();
  manager.runningChanged.connect(moved);
  flushSync(() => model.put(rank(1, { state: 'suspended', memory: 0 })));
  expect(part('r1', 'Word')).toBe('Suspended');
  expect(jobs().at(-1)).toBe('train.py3 ranks on Simulated GPU 0512.0 MiB');
  expect(moved).not.toHaveBeenCalled();
  flushSync(() => model.put(rank(1, { job: '', rank: null, ranks: null })));
  expect(moved).toHaveBeenCalledTimes(1);
});

test("other users' sessions have no actions", () => {
  model.put(aSession({ reason: '', name: '', owner: 'bob', kernel_id: '' }));
  render();
  expect(part('session-1', 'Name')).toBe('Session of bob');
  expect(part('session-1', 'Next')).toBe('In use by bob.');
  expect(button('session-1')).toBeNull();
  const item = place.querySelector('[data-context="session-1"]');
  expect(item?.classList.contains('jp-mod-mine')).toBe(false);
  expect(manager.running({ mode: 'list' })[0].open).toBeUndefined();
});

test('owners are named if there are several', () => {
  model.put(aSession({ id: 'session-2', owner: 'bob' }));
  render();
  expect([part('session-1', 'Owner'), part('session-2', 'Owner')]).toEqual(['ada', 'bob']);
});

test('rows change on their own; the list is rendered again only when rows are added, removed or moved', async () => {
  render();
  const moved = vi.fn();
  manager.runningChanged.connect(moved);
  flushSync(() => model.put(aSession({ state: 'suspended', memory: 0, pinned: true })));
  expect(part('session-1', 'Word')).toBe('Suspended');
  expect(row('session-1').querySelector('[role=img]')).not.toBeNull();
  expect(moved).not.toHaveBeenCalled();
  model.put(aSession({ device: 'cuda:1' }));
  expect(moved).toHaveBeenCalledTimes(1);
  model.sessions = [];
  flushSync(() => model.changed.emit());
  expect(moved).toHaveBeenCalledTimes(2);
});

test.each([
  [{ isReady: true, problem: '' }, 'No GPU session yet. Run a cell that uses CUDA.'],
  [{ isReady: false, problem: '' }, 'Loading…'],
  [{ isReady: false, problem: 'The server is away.' }, 'The server is away.'],
  [
    { isReady: true, problem: 'The server is away.' },
    'The server is away. This list may be out of date.'
  ]
])('without sessions %j reads %s', (state, text) => {
  Object.assign(model, state, { sessions: [] });
  model.changed.emit();
  render();
  expect(place.querySelector('.jp-Sing-note')?.textContent).toBe(text);
});

test('the search of JupyterLab finds the texts of labels', () => {
  const texts = manager
    .running({ mode: 'list' })
    .map(each => (each.label() as React.ReactElement<{ children: string[] }>).props.children);
  expect(texts).toEqual([['train.ipynb', '', 'Running', 'Simulated GPU 0']]);
});

test('the button for all suspends idle sessions that are not pinned', () => {
  model.sessions = [
    aSession({ id: 'a', state: 'idle' }),
    aSession({ id: 'b', state: 'idle', pinned: true }),
    aSession({ id: 'c' }),
    aSession({ id: 'd', state: 'idle', reason: '' }),
    aSession({ id: 'e', state: 'idle', worker_pid: null })
  ];
  expect(manager.shutdownAllLabel).toBe('Suspend Idle');
  expect(manager.shutdownAllConfirmationText()).toContain('Suspend one idle session?');
  manager.shutdownAll();
  expect(executed.mock.calls).toEqual([[CommandIDs.suspend, { session: 'a' }]]);
  model.sessions = [];
  expect(manager.shutdownAllConfirmationText()).toContain('You have no idle session');
});

test('refresh requests the status', () => {
  manager.refreshRunning();
  expect(model.refreshes).toBe(1);
});

test('an observer is held only while the widget is visible', async () => {
  const [panel, widget] = [new Panel(), new Widget()];
  panel.addWidget(widget);
  let held = 0;
  whileVisible(widget, () => {
    held++;
    return new DisposableDelegate(() => held--);
  });
  const after = async (what: () => void) => {
    what();
    // Widgets have a message loop of their own here, as modules are not shared as in JupyterLab.
    MessageLoop.sendMessage(widget, Widget.Msg.AfterShow);
    await Promise.resolve();
    return held;
  };
  expect(held).toBe(0);
  expect(await after(() => Widget.attach(panel, document.body))).toBe(1);
  expect(await after(() => panel.hide())).toBe(0);
  expect(await after(() => widget.hide())).toBe(0);
  expect(await after(() => panel.show())).toBe(0);
  expect(await after(() => widget.show())).toBe(1);
  expect(await after(() => panel.dispose())).toBe(0);
});
