import type { TranslationBundle } from '@jupyterlab/translation';
import type { Device } from '../api/tokens';

// Units of memory and time, as `kernelproxy/common/units.py` shows them; `testing/units.json` has
// the cases that both are tested with. Units of memory are binary: a GiB has 2^30 bytes.

/** A number of bytes: `1.5 GiB`. */
export function bytesText(count: number): string {
  let value = count;
  for (const unit of ['B', 'KiB', 'MiB']) {
    if (value < 1024) {
      return `${unit === 'B' ? Math.round(value) : tenths(value)} ${unit}`;
    }
    value /= 1024;
  }
  return `${tenths(value)} GiB`;
}

/** Use and size of a memory: `256.0 MiB of 2.0 GiB`. */
export function occupancyText(device: Pick<Device, 'memory_used' | 'memory_total'>): string {
  return `${bytesText(device.memory_used)} of ${bytesText(device.memory_total)}`;
}

/** A duration: `4 s`, `3 min`, `1.5 h`. */
export function durationText(seconds: number, trans: TranslationBundle): string {
  if (seconds < 1) {
    return trans.__('less than 1 s');
  }
  return seconds < 90
    ? trans.__('%1 s', Math.round(seconds))
    : seconds < 5400
      ? trans.__('%1 min', Math.round(seconds / 60))
      : trans.__('%1 h', Number(tenths(seconds / 3600)));
}

/** How much of a device's memory is in use, in percent. */
export function usedPercent(device: Device): number {
  const { memory_total: total, memory_used: used } = device;
  return total > 0 ? Math.min(100, Math.round((100 * used) / total)) : 0;
}

/** A part of a whole, which may be a little more than the whole by rounding: `63 %`. */
export function percentText(part: number, trans: TranslationBundle): string {
  return trans.__('%1\u00a0%', Math.round(100 * Math.min(part, 1)));
}

/** Format a time of today; for other days include the date. */
export function momentText(moment: Date, now: Date, language: string | undefined): string {
  const isToday = moment.toDateString() === now.toDateString();
  return new Intl.DateTimeFormat(language || undefined, {
    timeStyle: 'short',
    hourCycle: 'h23',
    ...(isToday ? {} : { dateStyle: 'medium' })
  }).format(moment);
}

/** Round to one decimal place, halves up. */
function tenths(value: number): string {
  return (Math.round(10 * value) / 10).toFixed(1);
}
