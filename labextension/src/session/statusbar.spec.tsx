import { nullTranslator } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { StatusItem } from './statusbar';
import { FakeContext } from '../testing/kernels';
import { FakeModel } from '../testing/model';
import { until } from '../testing/timeouts';
import { aDevice, aSession } from '../testing/sessions';

const GB = 2 ** 30;
let model: FakeModel;
let item: StatusItem;
let clicked: ReturnType<typeof vi.fn>;

beforeEach(() => {
  const device = { kind: 'cuda', memory_total: 80 * GB } as const;
  model = new FakeModel(
    [
      aDevice({ id: 'cuda:0', ...device, memory_used: GB }),
      aDevice({ id: 'cuda:1', ...device, memory_used: 12 * GB })
    ],
    [
      aSession({ device: 'cuda:1' }),
      aSession({ id: 'session-2', kernel_id: 'kernel-2', device: 'cuda:1', state: 'queued' })
    ]
  );
  clicked = vi.fn();
  item = new StatusItem({ model, trans: nullTranslator.load(''), onClick: clicked });
  // As the status bar does.
  item.changed.connect(() => item.update());
  Widget.attach(item, document.body);
});

afterEach(() => item.dispose());

const text = () => item.node.querySelector('.jp-SingReservedWidth > :first-child')?.textContent;

test('the status bar shows all devices, or the device of the current notebook', async () => {
  await until(() => text() === '2 GPUs: 13.0 GiB of 160.0 GiB · 1 waiting');
  const context = new FakeContext();
  context.start('kernel-1');
  item.context = context.asContext;
  await until(() => text() === 'GPU 1: 12.0 GiB of 80.0 GiB · 1 waiting');
  context.stop();
  await until(() => text() === '2 GPUs: 13.0 GiB of 160.0 GiB · 1 waiting');
});

test('the tooltip lists each device', async () => {
  const button = await until(() => item.node.querySelector('button'));
  expect(button.title).toContain(
    'GPU 0: 1.0 GiB of 80.0 GiB\nGPU 1: 12.0 GiB of 80.0 GiB · 1 waiting\n'
  );
  button.click();
  expect(clicked).toHaveBeenCalledTimes(1);
});

test('the status bar is hidden without devices or sessions', () => {
  expect(item.isActive).toBe(true);
  const devices = model.devices;
  model.devices = [];
  expect(item.isActive).toBe(false);
  model.devices = devices;
  model.sessions = [];
  expect(item.isActive).toBe(false);
});
