import type { TranslationBundle } from '@jupyterlab/translation';
import { occupancyText, durationText } from '../../text/format';
import { deviceName, readable, sessionName, stateWord } from '../../text/words';
import { endOf, type Kind, type Span } from './data';
import type { Item } from './layout';
import { type IRange, type ITick } from './range';

/** Return the word for a kind of event. */
export function kindWord(kind: Kind, trans: TranslationBundle): string {
  switch (kind) {
    case 'suspended':
      return trans.__('Suspended');
    case 'resumed':
      return trans.__('Resumed');
    case 'swapped_out':
      return trans.__('Moved to disk');
    case 'migrated':
      return trans.__('Migrated');
    case 'checkpoint':
      return trans.__('Checkpoint');
    case 'restored':
      return trans.__('Restored');
    case 'failed':
      return trans.__('Failed');
    case 'lost':
      return trans.__('State lost');
  }
}

/** Memory in use and total memory: `12.0 GiB of 80.0 GiB`. */
export function memoryText(used: number, total: number): string {
  return occupancyText({ memory_used: used, memory_total: total });
}

/** Formats moments in the language of the page, and in the time of the browser. */
export class Clock {
  constructor(language: string | undefined) {
    const formatter = (options: Intl.DateTimeFormatOptions) => {
      const format = new Intl.DateTimeFormat(language, { hourCycle: 'h23', ...options });
      return (at: number) => format.format(at * 1000);
    };
    this.date = formatter({ weekday: 'short', day: 'numeric', month: 'short' });
    this.time = formatter({ hour: '2-digit', minute: '2-digit' });
    const stamp = { day: 'numeric', month: 'short' } as const;
    this.full = formatter({ ...stamp, hour: '2-digit', minute: '2-digit', second: '2-digit' });
    this.exact = formatter({ hour: '2-digit', minute: '2-digit', second: '2-digit' });
  }

  readonly date: (at: number) => string;
  /** Hours and minutes. */
  readonly time: (at: number) => string;
  /** Hours, minutes and seconds. */
  readonly exact: (at: number) => string;
  /** With the day. */
  readonly full: (at: number) => string;

  /** Label of an axis with this many seconds between two ticks. */
  tick({ at, isDay }: ITick, seconds: number): string {
    return isDay ? this.date(at) : seconds < 60 ? this.exact(at) : this.time(at);
  }

  /** A time range, with the date only once if it is the same. */
  range({ start, end }: IRange): string {
    const format = end - start < 600 ? this.exact : this.time;
    const isOneDay = this.date(start) === this.date(end);
    const last = isOneDay ? format(end) : `${this.date(end)}, ${format(end)}`;
    return `${this.date(start)}, ${format(start)} – ${last}`;
  }
}

/** Facts about a span, in words. */
export interface ISpanFacts {
  name: string;
  owner: string;
  state: string;
  time: string;
  duration: string;
}

/** Return the facts about a span. */
export function spanFacts(
  span: Span,
  until: number,
  now: number,
  clock: Clock,
  trans: TranslationBundle
): ISpanFacts {
  const end = endOf(span, until, now);
  const from = clock.exact(span.start);
  return {
    name: sessionName(span, trans),
    owner: span.name ? span.owner : '',
    state: stateWord(span, trans),
    time: end >= now ? trans.__('since %1', from) : `${from} – ${clock.exact(end)}`,
    duration: durationText(end - span.start, trans)
  };
}

/** Return the word for an item of a timeline, and its additional text. */
export function itemFacts(item: Item, trans: TranslationBundle): { word: string; text: string } {
  return item.type === 'span'
    ? { word: stateWord(item.span, trans), text: '' }
    : { word: kindWord(item.event.kind, trans), text: readable(item.event.text) };
}

/** Describe an item of a timeline in one sentence, for screen readers. */
export function itemSentence(
  item: Item,
  device: string,
  until: number,
  now: number,
  clock: Clock,
  trans: TranslationBundle
): string {
  if (item.type === 'event') {
    const { kind, at, text } = item.event;
    const who = sessionName(item.event, trans);
    return trans.__('%1: %2, %3. %4', kindWord(kind, trans), who, clock.exact(at), readable(text));
  }
  const { name, owner, state, time, duration } = spanFacts(item.span, until, now, clock, trans);
  const where = deviceName(device);
  return owner
    ? trans.__('%1 of %2: %3 on %4, %5, %6.', name, owner, state, where, time, duration)
    : trans.__('%1: %2 on %3, %4, %5.', name, state, where, time, duration);
}
