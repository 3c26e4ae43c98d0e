import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, InputDialog, Notification } from '@jupyterlab/apputils';
import { CommandRegistry } from '@lumino/commands';
import { Signal } from '@lumino/signaling';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { commands as plugin, SESSION_CLASS } from './commands';
import { FakeModel } from '../testing/model';
import { aDevice, aSession } from '../testing/sessions';
import { SingSettings } from '../model/settings';
import { CommandIDs, type ISing, type Session } from '../api/tokens';

let registry: CommandRegistry;
let model: FakeModel;
let client: Record<string, ReturnType<typeof vi.fn>>;
let settings: SingSettings;
let shell: { currentWidget: object | null; currentChanged: Signal<object, void> };
let clicked: HTMLElement | undefined;
let opened: ReturnType<typeof vi.fn>;

/** The notebook in front, whose kernel has an id. */
const notebook = (kernel: string) => ({
  id: `notebook-${kernel}`,
  sessionContext: { session: { kernel: { id: kernel } } }
});

beforeEach(() => {
  registry = new CommandRegistry();
  model = new FakeModel([aDevice(), aDevice({ id: 'cpu:1', memory_used: 0 })], [aSession()]);
  const done = (overrides: Partial<Session>) => vi.fn(async () => aSession(overrides));
  client = {
    suspend: done({ state: 'suspended' }),
    resume: done({ state: 'idle' }),
    migrate: done({ device: 'cpu:1' }),
    pin: done({ pinned: true }),
    checkpoint: vi.fn(async () => ({ name: 'evening', created: '', stored: 2 ** 20 }))
  };
  settings = new SingSettings(null);
  shell = { currentWidget: null, currentChanged: new Signal({}) };
  clicked = undefined;
  opened = vi.fn();
  registry.addCommand('docmanager:open', { execute: opened });
  const running = [{ path: 'lessons/train.ipynb', type: 'notebook', kernel: { id: 'kernel-1' } }];
  const app = {
    commands: registry,
    shell: { ...shell, widgets: () => [], activateById: vi.fn() },
    contextMenuHitTest: (test: (node: HTMLElement) => boolean) =>
      clicked && test(clicked) ? clicked : undefined,
    serviceManager: { sessions: { running: () => running } }
  };
  Object.defineProperty(app.shell, 'currentWidget', { get: () => shell.currentWidget });
  const sing = { client, model, settings } as unknown as ISing;
  plugin.activate(app as unknown as JupyterFrontEnd, sing, null, null);
});

afterEach(() => {
  Notification.dismiss();
  vi.restoreAllMocks();
  document.body.replaceChildren();
});

const notifications = () =>
  Notification.manager.notifications.map(each => [each.type, each.message]);

/** Answer the dialog as soon as it is open. */
async function answer(label: string): Promise<HTMLElement> {
  const dialog = await vi.waitFor(() => {
    const found = document.querySelector<HTMLElement>('.jp-Dialog');
    expect(found).not.toBeNull();
    return found!;
  });
  const button = [...dialog.querySelectorAll<HTMLElement>('button')].find(
    each => each.textContent === label
  );
  button!.click();
  return dialog;
}

const session = 'session-1';

test.each([
  // for each state, the possible actions
  ['running', ['suspend', 'migrate', 'checkpoint', 'pin']],
  ['idle', ['suspend', 'migrate', 'checkpoint', 'pin']],
  ['queued', ['suspend', 'migrate', 'checkpoint', 'pin']],
  ['suspended', ['resume', 'migrate', 'checkpoint', 'pin']],
  ['restoring', ['checkpoint', 'pin']],
  ['migrating', ['checkpoint', 'pin']],
  ['failed', []]
] as const)('a session that is %s allows %j', (state, can) => {
  model.put(aSession({ state }));
  const verbs = ['suspend', 'resume', 'migrate', 'checkpoint', 'pin'] as const;
  for (const verb of verbs) {
    const enabled = (can as readonly string[]).includes(verb);
    expect([verb, registry.isEnabled(CommandIDs[verb], { session })]).toEqual([verb, enabled]);
    expect(registry.caption(CommandIDs[verb], { session })).toBeTruthy();
  }
});

test('a disabled command shows the reason', async () => {
  model.put(aSession({ state: 'suspended' }));
  expect(registry.caption(CommandIDs.suspend, { session })).toBe('It is already suspended.');
  await registry.execute(CommandIDs.suspend, { session });
  expect(client['suspend']).not.toHaveBeenCalled();
  expect(notifications()).toEqual([['info', 'It is already suspended.']]);
  model.devices = [aDevice()];
  expect(registry.caption(CommandIDs.migrate, { session })).toBe('There is no other GPU.');
});

test("other users' sessions allow no command", () => {
  model.put(aSession({ reason: '', name: '', kernel_id: '', owner: 'bob' }));
  expect(registry.isEnabled(CommandIDs.pin, { session })).toBe(false);
  expect(registry.caption(CommandIDs.pin, { session })).toBe('This session belongs to bob.');
});

test('commands apply to the current notebook, or to the clicked item', () => {
  model.put(aSession({ id: 'session-2', kernel_id: 'kernel-2', state: 'suspended' }));
  expect(registry.isEnabled(CommandIDs.suspend)).toBe(false);
  shell.currentWidget = notebook('kernel-1');
  expect(registry.isEnabled(CommandIDs.suspend)).toBe(true);
  clicked = document.createElement('div');
  clicked.classList.add(SESSION_CLASS);
  clicked.dataset['context'] = 'session-2';
  expect(registry.isEnabled(CommandIDs.suspend)).toBe(true);
  expect(registry.isEnabled(CommandIDs.suspend, { isContextMenu: true })).toBe(false);
  expect(registry.isEnabled(CommandIDs.resume, { isContextMenu: true })).toBe(true);
});

test('a running session is suspended after a confirmation, which can be switched off', async () => {
  let doing = registry.execute(CommandIDs.suspend, { session });
  await answer('Cancel');
  await doing;
  expect(client['suspend']).not.toHaveBeenCalled();
  doing = registry.execute(CommandIDs.suspend, { session });
  await vi.waitFor(() => expect(document.querySelector('.jp-Dialog')).not.toBeNull());
  document.querySelector<HTMLInputElement>('.jp-Dialog-checkbox input')!.click();
  await answer('Suspend');
  await doing;
  expect(client['suspend']).toHaveBeenCalledWith(session);
  expect(model.get(session)?.state).toBe('suspended');
  expect(settings.get('confirmSuspend')).toBe(false);
  model.put(aSession());
  await registry.execute(CommandIDs.suspend, { session });
  expect(client['suspend']).toHaveBeenCalledTimes(2);
  expect(notifications()).toEqual([]);
});

test('an idle session is suspended without a confirmation', async () => {
  model.put(aSession({ state: 'idle' }));
  await registry.execute(CommandIDs.suspend, { session });
  expect(client['suspend']).toHaveBeenCalledTimes(1);
});

test('a session migrates to the chosen device; the one with the most free memory is proposed', async () => {
  const doing = registry.execute(CommandIDs.migrate, { session });
  const chosen = await vi.waitFor(() => {
    const inputs = [...document.querySelectorAll<HTMLInputElement>('.jp-Sing-device input')];
    expect(inputs.map(each => [each.value, each.disabled, each.checked])).toEqual([
      ['cpu:0', true, false],
      ['cpu:1', false, true]
    ]);
    return inputs;
  });
  expect(chosen[1].parentElement?.textContent).toContain('free');
  await answer('Migrate');
  await doing;
  expect(client['migrate']).toHaveBeenCalledWith(session, 'cpu:1');
  expect(model.get(session)?.device).toBe('cpu:1');
});

test('a session migrates without a dialog if the device is given', async () => {
  await registry.execute(CommandIDs.migrate, { session, device: 'cpu:1' });
  expect(client['migrate']).toHaveBeenCalledWith(session, 'cpu:1');
});

test('the pin command toggles', async () => {
  expect(registry.isToggled(CommandIDs.pin, { session })).toBe(false);
  await registry.execute(CommandIDs.pin, { session });
  expect(client['pin']).toHaveBeenLastCalledWith(session, true);
  expect(registry.isToggled(CommandIDs.pin, { session })).toBe(true);
  await registry.execute(CommandIDs.pin, { session });
  expect(client['pin']).toHaveBeenLastCalledWith(session, false);
});

test('a checkpoint has the given name, or none', async () => {
  const ask = vi.spyOn(InputDialog, 'getText');
  const button = Dialog.okButton();
  ask.mockResolvedValueOnce({ button, isChecked: null, value: ' ' });
  await registry.execute(CommandIDs.checkpoint, { session });
  expect(client['checkpoint']).toHaveBeenLastCalledWith(session, '');
  expect(ask.mock.calls[0][0].text).toMatch(/^train-\d{8}-\d{4}$/);
  ask.mockResolvedValueOnce({ button: Dialog.cancelButton(), isChecked: null, value: null });
  await registry.execute(CommandIDs.checkpoint, { session });
  expect(client['checkpoint']).toHaveBeenCalledTimes(1);
});

test('an error of the server is shown once', async () => {
  client['resume'].mockRejectedValueOnce(new Error('cpu:0 has no room.'));
  model.put(aSession({ state: 'suspended' }));
  await registry.execute(CommandIDs.resume, { session });
  expect(notifications()).toEqual([['error', 'cpu:0 has no room.']]);
});

test('the notebook of a session is opened if this server has it', async () => {
  await registry.execute(CommandIDs.openNotebook, { session });
  expect(opened).toHaveBeenCalledWith({ path: 'lessons/train.ipynb', activate: true });
  model.put(aSession({ kernel_id: 'elsewhere' }));
  await registry.execute(CommandIDs.openNotebook, { session });
  expect(opened).toHaveBeenCalledTimes(1);
  expect(notifications()).toEqual([
    ['info', 'The notebook train.ipynb was not found on this server.']
  ]);
});

test('checkpoints are restored into notebooks, and not into what they have started', () => {
  registry.addCommand(CommandIDs.restore, { execute: () => undefined });
  model.put(aSession({ id: 'child', kernel_id: '', parent: session }));
  const here = 'jupyter_sing:restore-here';
  const enabled = (id: string) => registry.isEnabled(here, { session: id });
  expect([session, 'child'].map(enabled)).toEqual([true, false]);
});

test('the notebook that has started the process of a session is opened', async () => {
  model.sessions = [
    aSession(),
    aSession({ id: 'child', kernel_id: '', parent: session }),
    aSession({ id: 'below', kernel_id: '', parent: 'child' }),
    aSession({ id: 'program', kernel_id: '', parent: 'gone' })
  ];
  for (const id of ['child', 'below', 'program']) {
    await registry.execute(CommandIDs.openNotebook, { session: id });
  }
  expect(opened).toHaveBeenCalledTimes(2);
  expect(opened).toHaveBeenCalledWith({ path: 'lessons/train.ipynb', activate: true });
  expect(notifications()).toEqual([['info', 'train.ipynb was not started from a notebook.']]);
  const enabled = (id: string) => registry.isEnabled(CommandIDs.openNotebook, { session: id });
  expect(['below', 'program'].map(enabled)).toEqual([true, false]);
});

test('command changes are emitted only when the state changes', async () => {
  const onChanged = vi.fn();
  registry.commandChanged.connect((_, { id }) => id === CommandIDs.suspend && onChanged());
  model.put(aSession({ state: 'idle' }));
  expect(onChanged).toHaveBeenCalledTimes(1);
  model.put(aSession({ state: 'idle', memory: 7 }));
  expect(onChanged).toHaveBeenCalledTimes(1);
  shell.currentWidget = notebook('kernel-1');
  shell.currentChanged.emit();
  expect(onChanged).toHaveBeenCalledTimes(2);
});
