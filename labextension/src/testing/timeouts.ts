import { vi } from 'vitest';

/** Time limit for anything on a loaded machine. */
const MILLISECONDS_MAX = 120_000;

vi.setConfig({ testTimeout: MILLISECONDS_MAX });

/** Wait until a check returns something truthy. */
export function until<T>(check: () => T) {
  return vi.waitUntil(check, { timeout: MILLISECONDS_MAX, interval: 10 });
}
