import { vi } from 'vitest';

/** What anything may take on a loaded machine. */
const MILLISECONDS_MAX = 120_000;

vi.setConfig({ testTimeout: MILLISECONDS_MAX });

/** Wait until something is there, or true. */
export function until<T>(check: () => T) {
  return vi.waitUntil(check, { timeout: MILLISECONDS_MAX, interval: 10 });
}
