import type { Checkpoint } from '../api/tokens';

/** A checkpoint as the server describes one, with a test's values. */
export function aCheckpoint(overrides: Partial<Checkpoint> = {}): Checkpoint {
  return {
    name: 'before-lunch',
    created: '2026-01-01T12:00:00.000+00:00',
    session: 'train.ipynb',
    notebook: '/home/ada/lessons/train.ipynb',
    path: 'lessons/train.ipynb',
    kernel_id: 'kernel-1',
    automatic: false,
    forms: ['namespace', 'process'],
    torch: '2.13.0+cpu',
    device: 'cpu:0',
    bytes: 3 * 2 ** 20,
    stored: 2 * 2 ** 20,
    exclusive: 2 ** 20,
    saved: [
      { name: 'model', kind: 'Sequential', bytes: 2 ** 20 },
      { name: 'images', kind: 'Tensor', bytes: 2 ** 21 }
    ],
    omitted: [{ name: 'stream', why: 'a generator', partly: false }],
    only_process: [],
    files: 1,
    ...overrides
  };
}

/** A checkpoint that cannot be read. */
export const damaged: Checkpoint = {
  name: 'torn',
  created: '',
  path: '',
  problem: 'Its hash is wrong.'
};
