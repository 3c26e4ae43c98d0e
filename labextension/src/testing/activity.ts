import type { Activity, DeviceActivity, ActivityEvent, Span } from '../activity/data/data';

/** Pseudorandom numbers, the same each time. */
export function randomOf(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

const GB = 2 ** 30;
const PEOPLE: readonly (readonly [string, string, number])[] = [
  ['ada', 'vision/train_resnet.ipynb', 22],
  ['grace', 'nlp/finetune_llm.ipynb', 41],
  ['linus', 'lessons/tutorial.ipynb', 6],
  ['emmy', 'physics/flow_solver.ipynb', 17],
  ['alan', 'nlp/evaluate.ipynb', 12],
  ['ada', 'vision/ablation.ipynb', 14],
  ['mary', 'audio/diffusion.ipynb', 28],
  ['', '', 9],
  ['kurt', 'logic/prover.ipynb', 11],
  ['rosa', 'bio/folding.ipynb', 33]
];

/**
 * Make up the record of a day: notebooks that compute, wait for each other, are moved and saved; at
 * night only long computations.
 *
 * @param until - The end of the day, in seconds since the epoch.
 * @param spanCount - About how many spans there are on all devices.
 */
export function aDay(options: {
  until: number;
  devices: number;
  spanCount: number;
  seed?: number;
  kind?: 'cuda' | 'software';
}): Activity {
  const { until, devices: count, spanCount, seed = 7, kind = 'cuda' } = options;
  const random = randomOf(seed);
  const since = until - 86_400;
  const total = kind === 'cuda' ? 80 * GB : 2 * GB;
  const scale = total / (80 * GB);
  const events: ActivityEvent[] = [];
  const devices: DeviceActivity[] = Array.from({ length: count }, (_, index) => ({
    id: `${kind === 'cuda' ? 'cuda' : 'cpu'}:${index}`,
    kind,
    memory_total: total,
    held: [],
    memory: [],
    queue: []
  }));
  const happens = (
    at: number,
    what: ActivityEvent['kind'],
    who: number,
    device: number,
    text: string
  ) => events.push({ at, kind: what, ...nameOf(who), device: devices[device].id, text });
  const add = (device: number, who: number, state: Span['state'], start: number, end: number) =>
    devices[device].held.push({ ...nameOf(who), state, start, end: Math.min(end, until) });

  const mean = (86_400 * count) / spanCount;
  devices.forEach((_, device) => {
    // Two notebooks at a time take turns; when one has been away for long, another one replaces it.
    const resident = [device % PEOPLE.length, (device + count) % PEOPLE.length];
    let at = since + random() * 600;
    let turn = 0;
    while (at < until) {
      const hour = (at / 3600) % 24;
      const isNight = hour < 7;
      const who = resident[turn];
      const other = resident[1 - turn];
      const length = mean * (0.3 + 2.2 * random() ** 2) * (isNight ? 4 : 1);
      if (!isNight && random() < 0.06) {
        const [next] = pick(random, resident);
        happens(at, 'swapped_out', who, device, 'Moved to disk: other sessions need the device.');
        resident[turn] = next;
        add(device, next, 'restoring', at, at + mean * 0.12);
        happens(at, 'resumed', next, device, 'Resumed as a cell was run.');
        at += mean * 0.12;
        continue;
      }
      add(device, who, 'running', at, at + length);
      const end = at + length;
      if (random() < 0.05 && end < until) {
        happens(at + length / 2, 'checkpoint', who, device, 'Saved as “before-lunch”, 4.1 GiB.');
      }
      if (random() < 0.006 && end < until) {
        happens(end, 'failed', who, device, 'Its worker ended: out of host memory.');
        happens(end + mean / 3, 'restored', who, device, 'Restored from “before-lunch”.');
      }
      if (count > 1 && random() < 0.05 && end + mean < until) {
        const target = (device + 1) % count;
        add(device, who, 'migrating', end, end + mean * 0.08);
        happens(
          end + mean * 0.08,
          'migrated',
          who,
          target,
          `Moved from ${devices[device].id} to ${devices[target].id} in 1.2 s.`
        );
        add(target, who, 'running', end + mean * 0.08, end + mean * (0.5 + random()));
      } else if (random() < 0.5) {
        add(device, who, 'idle', end, end + mean * (0.4 + random()));
      } else {
        happens(
          Math.min(end, until),
          'suspended',
          who,
          device,
          'Suspended: resumes when you run a cell.'
        );
      }
      at = end + (random() < 0.35 || isNight ? mean * random() * (isNight ? 6 : 1.5) : 0);
      if (random() < 0.7) {
        turn = 1 - turn;
        if (at < until && at > end) {
          happens(at, 'resumed', other, device, 'Resumed as a cell was run.');
        }
      }
    }
  });
  devices.forEach(device => settle(device, random, scale, until));
  events.sort((one, other) => one.at - other.at);
  return { since, until, devices, events: events.filter(({ at }) => at < until) };
}

function nameOf(who: number): { session: string; name: string; owner: string } {
  const [owner, name] = PEOPLE[who];
  return { session: `session-${who}`, owner: owner || 'someone', name };
}

function pick(random: () => number, resident: readonly number[]): number[] {
  const others = PEOPLE.map((_, index) => index).filter(index => !resident.includes(index));
  return [others[Math.floor(random() * others.length)]];
}

/** Sort spans, so that no two spans of a session overlap, and make up memory and queue. */
function settle(device: DeviceActivity, random: () => number, scale: number, until: number): void {
  const endsOf = new Map<string, number>();
  device.held = device.held
    .filter(span => span.start < until)
    .sort((one, other) => one.start - other.start)
    .map(span => {
      const start = Math.max(span.start, endsOf.get(span.session) ?? 0);
      const end = Math.max(span.end, start);
      endsOf.set(span.session, end);
      return { ...span, start, end };
    })
    .filter(span => span.end - span.start > 0.5)
    .sort((one, other) => one.start - other.start);
  const changes = device.held.flatMap(span => {
    const bytes =
      PEOPLE[Number(span.session.slice(8))][2] * (0.85 + 0.3 * random()) * 2 ** 30 * scale;
    return [
      [span.start, bytes],
      [span.end, -bytes]
    ];
  });
  changes.sort((one, other) => one[0] - other[0]);
  let used = 0;
  device.memory = changes.map(([at, bytes]) => {
    used += bytes;
    return [at, Math.round(Math.min(Math.max(used, 0), device.memory_total))];
  });
  let waiting = 0;
  device.queue = device.held
    .filter(() => random() < 0.25)
    .map(span => {
      waiting = Math.max(0, Math.min(5, waiting + (random() < 0.5 ? 1 : -1)));
      return [span.start, waiting];
    });
}
