import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { IToolbarWidgetRegistry } from '@jupyterlab/apputils';
import { nullTranslator } from '@jupyterlab/translation';
import { CommandRegistry } from '@lumino/commands';
import { Widget } from '@lumino/widgets';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { Pill, pill as plugin } from './pill';
import { SingSettings } from '../model/settings';
import { FakeContext } from '../testing/kernels';
import { FakeModel } from '../testing/model';
import { until } from '../testing/timeouts';
import { aDevice, aSession } from '../testing/sessions';
import { CommandIDs, type ISing, type Session } from '../api/tokens';

import { turnText } from '../text/words';

const trans = nullTranslator.load('');
let model: FakeModel;
let context: FakeContext;
let pill: Pill;

beforeEach(() => {
  model = new FakeModel([aDevice()], [aSession()]);
  context = new FakeContext();
  context.start('kernel-1');
  const commands = new CommandRegistry();
  pill = new Pill({ model, context: context.asContext, commands, trans });
  Widget.attach(pill, document.body);
});

afterEach(() => {
  pill.dispose();
  document.body.textContent = '';
});

async function button(): Promise<HTMLButtonElement> {
  return until(() => pill.node.querySelector('button'));
}

function isBlank(): boolean {
  return pill.node.querySelector('.jp-mod-blank') !== null && !pill.node.querySelector('button');
}

function word(): string | null | undefined {
  return pill.node.querySelector('.jp-SingReservedWidth > :first-child')?.textContent;
}

function popover(): Element | null {
  return document.querySelector('[role=dialog]');
}

test.each<[Partial<Session>, string]>([
  [{ state: 'running' }, 'Running'],
  [{ state: 'idle' }, 'Idle'],
  [{ state: 'queued', queue_position: 2 }, 'Queued, place 2'],
  [{ state: 'suspended' }, 'Suspended'],
  [{ state: 'restoring' }, 'Restoring'],
  [{ state: 'migrating' }, 'Migrating'],
  [{ state: 'failed' }, 'Error'],
  [
    { state: 'preparing', progress: { verb: 'prepare', checkpoint: '', done: 12, total: 58 } },
    'Preparing, 12 of 58'
  ]
])('the pill shows %j as %s, with an icon and its sentence', async (overrides, expected) => {
  model.put(aSession({ ...overrides, reason: 'So it is.' }));
  await until(() => word() === expected);
  const shown = await button();
  expect(shown.querySelector('svg')).not.toBeNull();
  expect(shown.title).toBe('So it is.');
  expect(shown.getAttribute('aria-label')).toBe(`${expected}: GPU session of this kernel`);
  expect(shown.dataset['state']).toBe(overrides.state);
});

test('the pill shows that a session is pinned', async () => {
  await until(() => word() === 'Running');
  expect(pill.node.querySelector('.jp-mod-pin')).toBeNull();
  model.put(aSession({ pinned: true }));
  await until(() => pill.node.querySelector('.jp-mod-pin'));
  const label = (await button()).getAttribute('aria-label');
  expect(label).toBe('Running, stays on GPU: GPU session of this kernel');
});

test('an unreachable server replaces the last known state', async () => {
  context.connectionStatusChanged.emit('connecting');
  expect(model.refreshes).toBe(1);
  model.isUnreachable = true;
  model.changed.emit();
  await until(() => word() === 'Server unreachable');
  expect((await button()).dataset['state']).toBe('unreachable');
  pill.open();
  const card = await until(() => popover()?.querySelector('[role=status]'));
  expect(card.textContent).toContain('does not respond');
  model.isUnreachable = false;
  model.changed.emit();
  await until(() => word() === 'Running');
});

test('a kernel without a session reads CPU only, once that is known', async () => {
  context.start('kernel-2', 'starting');
  await until(isBlank);
  context.start('kernel-2', 'idle');
  await button();
  expect(word()).toBe('CPU only');
});

test('the pill is empty without a kernel and before the first response, but keeps its width', async () => {
  context.stop();
  await until(isBlank);
  expect(pill.node.querySelectorAll('.jp-SingReservedWidth-text').length).toBeGreaterThan(5);
  context.start('kernel-1');
  await button();
  model.isReady = false;
  model.changed.emit();
  await until(isBlank);
});

test('the pill follows the kernel of its notebook', async () => {
  model.put(aSession({ id: 'session-2', kernel_id: 'kernel-2', state: 'suspended' }));
  await until(() => word() === 'Running');
  context.start('kernel-2');
  await until(() => word() === 'Suspended');
});

test('the pill shows the progress of a checkpoint, or an indeterminate bar', async () => {
  const bar = () => pill.node.querySelector<HTMLElement>('.jp-SingPill-bar > span');
  await button();
  expect(bar()).toBeNull();
  const progress = { verb: 'checkpoint', checkpoint: 'a', done: 1, total: 4 } as const;
  model.put(aSession({ progress }));
  await until(() => bar()?.style.width === '25%');
  expect((await button()).getAttribute('aria-label')).toContain('Running, 25\u00a0%');
  model.put(aSession({ state: 'migrating' }));
  await until(() => bar()?.className === 'jp-mod-indeterminate');
});

test('the pill opens and closes the popover, and observes only meanwhile', async () => {
  const shown = await button();
  shown.click();
  expect(popover()).not.toBeNull();
  expect(model.observers).toBe(1);
  await until(() => shown.getAttribute('aria-expanded') === 'true');
  shown.click();
  expect(popover()).toBeNull();
  expect(model.observers).toBe(0);
  await until(() => shown.getAttribute('aria-expanded') === 'false');
});

test('the popover closes when the kernel ends or the notebook is hidden', async () => {
  await button();
  pill.open();
  expect(popover()).not.toBeNull();
  context.stop();
  await until(() => popover() === null);
  context.start('kernel-1');
  pill.open();
  expect(popover()).not.toBeNull();
  pill.hide();
  expect(popover()).toBeNull();
  pill.open();
  expect(popover()).toBeNull();
});

test('the pill is in toolbars unless switched off, and a command opens its popover', async () => {
  const commands = new CommandRegistry();
  const settings = new SingSettings(null);
  const panel = Object.assign(new Widget(), { sessionContext: context });
  const app = { commands, shell: { currentWidget: panel } } as unknown as JupyterFrontEnd;
  const factories = new Map<string, (panel: Widget) => Widget>();
  const toolbars = {
    addFactory: (toolbar: string, _: string, create: (panel: Widget) => Widget) =>
      factories.set(toolbar, create)
  } as unknown as IToolbarWidgetRegistry;
  void plugin.activate(app, { model, settings } as unknown as ISing, toolbars, null);
  expect([...factories.keys()]).toEqual(['Notebook', 'ConsolePanel']);
  expect(commands.isEnabled(CommandIDs.showState)).toBe(false);

  const made = factories.get('Notebook')!(panel);
  Widget.attach(made, document.body);
  await commands.execute(CommandIDs.showState);
  expect(popover()).not.toBeNull();
  await settings.set('showPill', false);
  expect(made.isHidden).toBe(true);
  expect(popover()).toBeNull();
  await settings.set('showPill', true);
  await commands.execute(CommandIDs.showState, { session: 'session-1' });
  expect(popover()).not.toBeNull();

  made.dispose();
  expect(commands.isEnabled(CommandIDs.showState)).toBe(false);
});

test('a session that takes turns reads the same in and between turns', async () => {
  const shared = { devices: ['cpu:0'], with: ['bob', 'b.ipynb'], share: 0.5 };
  const turns: Partial<Session>[] = [
    { state: 'running', worker_pid: 7 },
    { state: 'queued', queue_position: 1, expected_wait: 2.8 },
    { state: 'suspended', worker_pid: null, queue_position: null, expected_wait: null },
    { state: 'queued', queue_position: 2, expected_wait: null },
    { state: 'restoring', queue_position: null }
  ];
  const read = new Set<string>();
  model.put(aSession({ state: 'queued', queue_position: 1 }));
  await until(() => word() === 'Queued, next');
  for (const overrides of [...turns, ...turns]) {
    model.put(aSession({ shared, queue_position: null, ...overrides }));
    await until(() => word() === 'Sharing');
    const { title, dataset } = await button();
    read.add(`${dataset.state} ${title.split(' · ').slice(0, 2).join(' · ')}`);
  }
  expect([...read]).toEqual([
    'running Sharing Simulated GPU 0 with bob and 1 more · my share 50\u00a0%'
  ]);
  model.put(aSession({ state: 'running' }));
  await until(() => word() === 'Running');
});

test.each([
  [null, null, 'running now'],
  [1, 2.8, 'next turn in about 3 s'],
  [1, 0.2, 'next turn any moment now'],
  [2, null, 'waiting for the next turn']
])('at place %s with %s s left, the next turn reads: %s', (place, left, text) => {
  expect(turnText(place, left, trans)).toBe(text);
});
