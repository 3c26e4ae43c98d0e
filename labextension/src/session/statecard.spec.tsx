import { nullTranslator } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import { CommandRegistry } from '@lumino/commands';
import { Widget } from '@lumino/widgets';
import * as React from 'react';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { StateCard } from './statecard';
import { FakeModel } from '../testing/model';
import { until } from '../testing/timeouts';
import { aDevice, aSession } from '../testing/sessions';
import { CommandIDs, type Session } from '../api/tokens';

const trans = nullTranslator.load('');
let model: FakeModel;
let commands: CommandRegistry;
let executed: ReturnType<typeof vi.fn>;
let obstacle: string;
let card: Widget;
let left: ReturnType<typeof vi.fn>;

beforeEach(() => {
  model = new FakeModel([aDevice()], []);
  commands = new CommandRegistry();
  executed = vi.fn();
  left = vi.fn();
  obstacle = '';
  for (const id of [
    CommandIDs.suspend,
    CommandIDs.resume,
    CommandIDs.pin,
    CommandIDs.checkpoint,
    CommandIDs.openActivity
  ]) {
    commands.addCommand(id, {
      execute: args => executed(id, args),
      isEnabled: () => obstacle === '',
      caption: () => obstacle
    });
  }
});

afterEach(() => {
  card.dispose();
  vi.restoreAllMocks();
});

/** Show a session, and others beside it. */
async function show(session: Session | undefined, ...others: Session[]): Promise<void> {
  model.sessions = session ? [session, ...others] : others;
  card = ReactWidget.create(<StateCard {...{ model, session, commands, trans }} onLeave={left} />);
  Widget.attach(card, document.body);
  await until(() => card.node.firstElementChild);
}

const text = () => card.node.textContent ?? '';
const buttons = () => [...card.node.querySelectorAll('button')];
const label = (each: Element) =>
  each.querySelector('.jp-SingReservedWidth > :first-child')?.textContent ?? each.textContent;
const button = (text: string) => buttons().find(each => label(each) === text)!;

test.each<[Partial<Session>, string[]]>([
  [{ state: 'running' }, ['Suspend', 'Keep on GPU', 'Save checkpoint', 'Activity']],
  [{ state: 'queued' }, ['Suspend', 'Keep on GPU', 'Save checkpoint', 'Activity']],
  [{ state: 'suspended' }, ['Resume now', 'Keep on GPU', 'Save checkpoint', 'Activity']]
])('for %j, the card offers %j', async (overrides, labels) => {
  await show(aSession(overrides));
  expect(buttons().map(label)).toEqual(labels);
});

test('what the kernel has started is named, with the number of its ranks', async () => {
  const started = [1, 0].map(rank =>
    aSession({
      id: `r${rank}`,
      name: `train.ipynb rank ${rank}`,
      kernel_id: '',
      parent: 'session-1',
      ...{ job: 'run', rank, ranks: 2 }
    })
  );
  await show(aSession({ state: 'idle' }), ...started);
  expect(text()).toContain('Started from here: 2 ranks on Simulated GPU 0');
  const names = [...card.node.querySelectorAll('.jp-SingCard-name')].map(each => each.textContent);
  expect(names).toEqual(['train.ipynb rank 0', 'train.ipynb rank 1']);
});

test('a toggled button keeps the focus', async () => {
  const session = aSession({ state: 'running' });
  const Shown = (overrides: { session: Session }) => (
    <StateCard {...{ model, commands, trans }} session={overrides.session} onLeave={left} />
  );
  const [first, then] = [session, { ...session, state: 'suspended' } as Session];
  model.sessions = [session];
  const widget = ReactWidget.create(<Shown session={first} />);
  card = widget;
  Widget.attach(card, document.body);
  await until(() => card.node.firstElementChild);
  button('Suspend').focus();
  (widget as ReactWidget & { render: () => React.JSX.Element }).render = () => (
    <Shown session={then} />
  );
  widget.update();
  await until(() => button('Resume now'));
  expect(document.activeElement).toBe(button('Resume now'));
});

test('buttons of the card act on its session, and links open other views', async () => {
  await show(aSession({ pinned: true }));
  button('Suspend').click();
  expect(executed).toHaveBeenLastCalledWith(CommandIDs.suspend, { session: 'session-1' });
  expect(button('Keep on GPU').getAttribute('aria-pressed')).toBe('true');
  expect(left).not.toHaveBeenCalled();
  button('Activity').click();
  expect(executed).toHaveBeenLastCalledWith(CommandIDs.openActivity, {});
  expect(left).toHaveBeenCalledTimes(1);
});

test.each<[number | null, 'premium' | 'basic', boolean]>([
  [0, 'premium', true],
  [0.95, 'premium', false],
  [0, 'basic', false],
  [null, 'premium', false]
])(
  'a session that shares, with guarantee %s and tier %s, shows a shortfall: %s',
  async (promised, tier, isShown) => {
    const shared = { devices: ['cpu:0'], with: ['bob'], share: 0.5 };
    await show(aSession({ promised, served_as: tier, shared }));
    expect(text().includes('without its guaranteed share')).toBe(isShown);
  }
);

test('a disabled button shows the reason, and does nothing', async () => {
  obstacle = 'A checkpoint is being saved.';
  await show(aSession());
  const disabled = button('Save checkpoint');
  disabled.click();
  expect(executed).not.toHaveBeenCalled();
  expect(disabled.getAttribute('aria-disabled')).toBe('true');
  const reasons = document.getElementById(disabled.getAttribute('aria-describedby')!);
  expect(reasons?.textContent).toBe('A checkpoint is being saved.');
});

test('an action in progress is not started twice', async () => {
  let end: () => void = () => undefined;
  executed.mockReturnValueOnce(new Promise<void>(resolve => (end = resolve)));
  await show(aSession());
  button('Suspend').click();
  await until(() => button('Suspend').getAttribute('aria-busy') === 'true');
  button('Suspend').click();
  expect(executed).toHaveBeenCalledTimes(1);
  end();
  await until(() => button('Suspend').getAttribute('aria-busy') === 'false');
});

test('the card of a kernel without a session shows what to do', async () => {
  await show(undefined);
  expect(text()).toContain('CPU only');
  expect(text()).toContain('jupyter sing doctor');
  expect(buttons().map(label)).toEqual(['Activity']);
});

test('neighbours are named: notebooks of this user, owners of others', async () => {
  await show(
    aSession(),
    aSession({ id: 'ours', name: 'lessons/compare.ipynb', state: 'idle' }),
    aSession({ id: 'theirs', name: '', owner: 'bob', reason: '' }),
    aSession({ id: 'away', name: 'away.ipynb', state: 'suspended', memory: 0 })
  );
  const others = [...card.node.querySelectorAll('li')].map(each => each.textContent);
  expect(others).toEqual(['compare.ipynbIdle256.0 MiB', 'Session of bobRunning256.0 MiB']);
  expect(text()).toContain('256.0 MiB of 2.0 GiB on Simulated GPU 0');
  expect(text()).toContain('256.0 MiB used by this notebook');
});

test('the wait counts down between two estimates', async () => {
  const now = vi.spyOn(Date, 'now').mockReturnValue(0);
  await show(aSession({ state: 'queued', queue_position: 1, expected_wait: 20 }));
  expect(text()).toContain('You are next, about 20 s');
  now.mockReturnValue(5000);
  await until(() => text().includes('You are next, about 15 s'));
  now.mockReturnValue(60_000);
  await until(() => text().includes('takes longer than expected'));
});

test('the card shows the progress of a checkpoint', async () => {
  const progress = { verb: 'checkpoint', checkpoint: 'evening', done: 1, total: 4 } as const;
  await show(aSession({ progress }));
  const bar = card.node.querySelector('[role=progressbar]');
  expect(bar?.getAttribute('aria-valuenow')).toBe('25');
  expect(text()).toContain('Saving checkpoint evening');
});

test('the card shows that it may be out of date', async () => {
  model.problem = 'The Jupyter server cannot be reached.';
  await show(aSession());
  expect(text()).toContain('This may be out of date: The Jupyter server cannot be reached.');
});
