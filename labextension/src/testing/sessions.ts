import type { Device, Session } from '../api/tokens';

/** A session as the server describes one, with a test's values. */
export function aSession(overrides: Partial<Session> = {}): Session {
  return {
    id: 'session-1',
    name: 'lessons/train.ipynb',
    owner: 'ada',
    kernel_id: 'kernel-1',
    kernel_pid: 1,
    worker_pid: 2,
    state: 'running',
    tier: 'resident',
    device: 'cpu:0',
    memory: 2 ** 28,
    log_head: 0,
    log_consumed: 0,
    log_bytes: 0,
    last_activity: '2026-01-01T00:00:00.000+00:00',
    operators: 0,
    gpu_seconds: 0,
    step_seconds: null,
    memory_nadir: null,
    recoverable: true,
    served_as: null,
    promised: null,
    shared: null,
    queued_for: 0,
    queue_position: null,
    expected_wait: null,
    suspended_by: null,
    suspended_at: null,
    reason: 'Running on the GPU.',
    pinned: false,
    priority: null,
    loading: 0,
    snapshot: null,
    migration: null,
    automatic: { every: 0, cells: 0, keep: 3, problem: '' },
    last_checkpoint: null,
    progress: null,
    parent: '',
    job: '',
    rank: null,
    ranks: null,
    ...overrides
  };
}

/** A device as the server describes one. */
export function aDevice(overrides: Partial<Device> = {}): Device {
  const memory = { memory_total: 2 ** 31, memory_used: 2 ** 28 };
  const name = 'Software device (2 CPU threads)';
  const use = { sessions: ['session-1'], failure: '', ...memory };
  return { id: 'cpu:0', kind: 'software', name, ...use, ...overrides };
}
