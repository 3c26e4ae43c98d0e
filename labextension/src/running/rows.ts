import type { TranslationBundle } from '@jupyterlab/translation';
import { Signal } from '@lumino/signaling';
import { isWaiting } from '../text/facts';
import type { Shown } from '../ui/icons';
import type { Device, ISingModel, Outside, Session } from '../api/tokens';
import { isMine, obstacle } from '../text/sessionactions';
import {
  isRank,
  jobId,
  jobName,
  jobSentence,
  jobsOf,
  partsOf,
  placeText,
  ranksText,
  type IJob
} from '../text/jobs';
import { bytesText, occupancyText, usedPercent } from '../text/format';
import { deviceName, sessionName, shown, stateSentence, stateWord } from '../text/words';

/** Contents of a session's row. */
export interface ISessionRow {
  readonly id: string;
  readonly shown: Shown;
  readonly name: string;
  /** Owner; empty if the name contains it, or if all sessions are the same user's. */
  readonly owner: string;
  readonly word: string;
  readonly pinned: boolean;
  readonly memory: string;
  readonly device: string;
  /** Its number in a job, as text; empty if it is in none. */
  readonly rank: string;
  /** What happens next. */
  readonly sentence: string;
  /** Action of its button, or null. */
  readonly action: 'suspend' | 'resume' | null;
}

/** Contents of a device's row. */
export interface IDeviceRow {
  readonly name: string;
  /** Percentage of its memory in use. */
  readonly used: number;
  readonly occupancy: string;
  /** Number of sessions that wait for it. */
  readonly waiting: number;
  /** Why it is out of use; empty if it is in use. */
  readonly failure: string;
}

/** Contents of the row of a process that uses a device outside of sessions. */
export interface IOutsideRow {
  readonly name: string;
  readonly owner: string;
  readonly memory: string;
  readonly sentence: string;
}

/** Contents of the row of a job: of all its ranks, or of those that are on a device. */
export interface IJobRow {
  readonly id: string;
  readonly name: string;
  /** Number of ranks. */
  readonly count: string;
  /** Where they are; empty if the row is below that device. */
  readonly place: string;
  readonly memory: string;
  /** How it runs, and why; empty for other users' jobs. */
  readonly sentence: string;
}

/** A session with what is below it, or a job with its ranks. */
export interface IEntry {
  readonly id: string;
  readonly isJob: boolean;
  /** Id of the session whose notebook is opened from the row; empty if there is none. */
  readonly opens: string;
  /** Sessions of processes that its process has started, and their jobs; or ranks. */
  readonly below: readonly IEntry[];
}

/** A device and who uses it, or the sessions on no device. */
export interface IGroup {
  readonly device: string | null;
  readonly sessions: readonly IEntry[];
  /** Ids of the rows of jobs that are listed elsewhere, and have ranks on the device. */
  readonly parts: readonly string[];
  /** Ids of the rows of processes outside of sessions. */
  readonly outside: readonly string[];
}

/**
 * The rows of the panel.
 *
 * Note [Rows]: JupyterLab renders all items again for each `runningChanged`, and each of them then
 * connects once more to its section's signal, permanently. So that signal is emitted only when rows
 * are added, removed or moved. A change inside a row is reported only to that row, by `changed`,
 * and only if its text differs: row objects stay the same until then.
 */
export class Rows {
  /** Emitted when rows are added, removed or moved. */
  readonly moved = new Signal<this, void>(this);
  /** Emitted when the text of some rows has changed. */
  readonly changed = new Signal<this, void>(this);

  constructor(
    private readonly _model: ISingModel,
    private readonly _trans: TranslationBundle
  ) {
    this._read();
    _model.changed.connect(this._onChanged, this);
  }

  /** Devices and their sessions, in an order that states do not change. */
  get groups(): readonly IGroup[] {
    return this._groups;
  }

  /** An additional message, or one in place of the rows, in a sentence; empty if there is none. */
  get note(): string {
    return this._note;
  }

  session(id: string): ISessionRow | undefined {
    return this._sessions.get(id);
  }

  job(id: string): IJobRow | undefined {
    return this._jobs.get(id);
  }

  device(id: string): IDeviceRow | undefined {
    return this._devices.get(id);
  }

  outside(id: string): IOutsideRow | undefined {
    return this._outside.get(id);
  }

  /** Searchable texts of the row of a session, or of a process outside of sessions. */
  searched(id: string): string[] {
    const session = this._sessions.get(id);
    if (session) {
      return [session.name, session.owner, session.word, session.device];
    }
    const job = this._jobs.get(id);
    if (job) {
      return [job.name];
    }
    const process = this._outside.get(id);
    return process ? [process.name, process.owner] : [];
  }

  private _onChanged(): void {
    const before = this._shape;
    this._read();
    if (this._shape !== before) {
      this.moved.emit();
    }
    this.changed.emit();
  }

  private _read(): void {
    const { devices, sessions } = this._model;
    const several = new Set(sessions.map(each => each.owner)).size > 1;
    this._sessions = renewed(this._sessions, sessions, each =>
      this._sessionRow(each, several && each.name ? each.owner : '')
    );
    this._jobs = renewed(this._jobs, [...jobsOf(sessions), ...partsOf(sessions)], each =>
      this._jobRow(each)
    );
    const waiting = new Map<string | null, number>();
    sessions
      .filter(isWaiting)
      .forEach(each => waiting.set(each.device, (waiting.get(each.device) ?? 0) + 1));
    this._devices = renewed(this._devices, devices, each =>
      this._deviceRow(each, waiting.get(each.id) ?? 0)
    );
    const outside = devices.flatMap(each => outsideUses(each));
    this._outside = renewed(this._outside, outside, each => this._outsideRow(each));
    this._groups = this._grouped(outside);
    this._note = this._noteText();
    this._shape = JSON.stringify([this._groups, this._note]);
  }

  private _sessionRow(session: Session, owner: string): ISessionRow {
    const { _trans: trans } = this;
    const can = (verb: 'suspend' | 'resume') => !obstacle(verb, session, trans);
    return {
      id: session.id,
      shown: shown(session),
      name: sessionName(session, trans),
      owner,
      word: stateWord(session, trans),
      pinned: session.pinned,
      memory: session.memory > 0 ? bytesText(session.memory) : '',
      device: session.device ? deviceName(session.device) : '',
      rank: isRank(session) ? trans.__('Rank %1', session.rank) : '',
      sentence: stateSentence(session, trans),
      action: can('suspend') ? 'suspend' : can('resume') ? 'resume' : null
    };
  }

  private _jobRow({ id, device, ranks }: IJob): IJobRow {
    const { _trans: trans } = this;
    const memory = ranks.reduce((sum, each) => sum + each.memory, 0);
    return {
      id,
      name: jobName(ranks, trans),
      count: ranksText(ranks, trans),
      place: device === null ? placeText(ranks, trans) : '',
      memory: memory > 0 ? bytesText(memory) : '',
      sentence: jobSentence(ranks, trans)
    };
  }

  private _deviceRow(device: Device, waiting: number): IDeviceRow {
    return {
      name: deviceName(device.id),
      used: usedPercent(device),
      occupancy: occupancyText(device),
      waiting,
      failure: device.failure
    };
  }

  private _outsideRow({ process, memory }: IOutsideUse): IOutsideRow {
    const { _trans: trans } = this;
    const notebook = this._model.sessions.find(each => process && each.kernel_pid === process.pid);
    const name = notebook
      ? sessionName(notebook, trans)
      : process?.command || (process ? trans.__('Process %1', process.pid) : trans.__('Others'));
    const text = memory === null ? trans.__('Memory') : bytesText(memory);
    const sentence = process
      ? trans.__('%1 is used outside of sessions, by process %2.', text, process.pid)
      : trans.__('%1 is used outside of sessions; the driver does not say by whom.', text);
    const memoryText = memory === null ? '' : bytesText(memory);
    return { name, owner: process?.user ?? '', memory: memoryText, sentence };
  }

  private _grouped(outside: readonly IOutsideUse[]): IGroup[] {
    const { devices, sessions } = this._model;
    const tree = new Tree(sessions, devices, ({ id }) => this._sessions.get(id)?.name ?? '');
    const parts = partsOf(sessions);
    const group = (device: string | null): IGroup => {
      const entries = tree.on(device);
      const shown = new Set(flat(entries).map(each => each.id));
      return {
        device,
        sessions: entries,
        parts: parts
          .filter(each => each.device === device && !shown.has(jobId(each.ranks[0])))
          .map(each => each.id),
        outside: outside.filter(each => each.device === device).map(each => each.id)
      };
    };
    const elsewhere = group(null);
    const groups = devices.map(each => group(each.id));
    return elsewhere.sessions.length > 0 ? [...groups, elsewhere] : groups;
  }

  private _noteText(): string {
    const { isReady, problem, sessions } = this._model;
    if (problem) {
      return isReady ? this._trans.__('%1 This list may be out of date.', problem) : problem;
    }
    if (!isReady) {
      return this._trans.__('Loading…');
    }
    return sessions.length > 0
      ? ''
      : this._trans.__('No GPU session yet. Run a cell that uses CUDA.');
  }

  private _sessions: ReadonlyMap<string, ISessionRow> = new Map();
  private _jobs: ReadonlyMap<string, IJobRow> = new Map();
  private _devices: ReadonlyMap<string, IDeviceRow> = new Map();
  private _outside: ReadonlyMap<string, IOutsideRow> = new Map();
  private _groups: readonly IGroup[] = [];
  private _note = '';
  private _shape = '';
}

/** Return entries and all that is below them. */
export function flat(entries: readonly IEntry[]): IEntry[] {
  return entries.flatMap(each => [each, ...flat(each.below)]);
}

/**
 * Sessions as they are nested: below each those of processes that it started, ranks below jobs.
 *
 * Note [Places of jobs]: a job has one row, also if its ranks are on several devices and are
 * migrated between them, so that its rows stay where they are: below the session whose process has
 * started it, else after the devices. Other devices that have ranks of it say so in a row without
 * any below. If there is one device only, all is below that.
 */
class Tree {
  constructor(
    sessions: readonly Session[],
    private readonly _devices: readonly Device[],
    name: (session: Session) => string
  ) {
    const ordered = [...sessions].sort(
      (a, b) =>
        name(a).localeCompare(name(b), undefined, { numeric: true }) || a.id.localeCompare(b.id)
    );
    const known = new Map(sessions.map(each => [each.id, each]));
    for (const each of ordered) {
      const parent = known.get(each.parent);
      const isBelow = parent && (isRank(each) || parent.device === each.device);
      const place = isBelow ? parent.id : '';
      this._below.set(place, [...(this._below.get(place) ?? []), each]);
    }
  }

  /** Return what is below a device, or on none. */
  on(device: string | null): IEntry[] {
    const roots = this._below.get('') ?? [];
    return this._entries(roots.filter(each => this._deviceOf(each) === device));
  }

  private _deviceOf(root: Session): string | null {
    const { _devices: devices } = this;
    const isOnOne = !isRank(root) || devices.length === 1;
    return isOnOne && devices.some(each => each.id === root.device) ? root.device : null;
  }

  private _entries(siblings: readonly Session[]): IEntry[] {
    const jobs = new Map(jobsOf(siblings).map(each => [each.id, each.ranks]));
    return siblings.flatMap(each => {
      if (!isRank(each)) {
        return [this._session(each)];
      }
      const id = jobId(each);
      const ranks = jobs.get(id); // the job's row is where its first rank would be
      jobs.delete(id);
      return ranks ? [this._job(id, ranks)] : [];
    });
  }

  private _session(session: Session): IEntry {
    const { id } = session;
    const below = this._entries(this._below.get(id) ?? []);
    return { id, isJob: false, opens: isMine(session) ? id : '', below };
  }

  private _job(id: string, ranks: Session[]): IEntry {
    const below = ranks.sort((a, b) => (a.rank ?? 0) - (b.rank ?? 0)).map(e => this._session(e));
    return { id, isJob: true, opens: ranks[0].parent && below[0].opens, below };
  }

  private readonly _below = new Map<string, Session[]>();
}

/** Use of a device outside of sessions: by a process, or in total if the driver names none. */
interface IOutsideUse {
  readonly id: string;
  readonly device: string;
  /** Bytes; null if unknown. */
  readonly memory: number | null;
  readonly process: Outside['processes'][number] | null;
}

function outsideUses({ id: device, outside }: Device): IOutsideUse[] {
  if (!outside) {
    return [];
  }
  if (!outside.complete && outside.memory > 0) {
    return [{ id: `outside ${device}`, device, memory: outside.memory, process: null }];
  }
  return outside.processes.map(process => ({
    id: `outside ${device} ${process.pid}`,
    device,
    memory: process.memory,
    process
  }));
}

/** Return the rows of the current items; rows with the same text are reused. */
function renewed<T extends { readonly id: string }, Row extends object>(
  before: ReadonlyMap<string, Row>,
  found: readonly T[],
  row: (each: T) => Row
): ReadonlyMap<string, Row> {
  return new Map(
    found.map(each => {
      const [old, now] = [before.get(each.id), row(each)];
      return [each.id, old && same(old, now) ? old : now];
    })
  );
}

function same<Row extends object>(a: Row, b: Row): boolean {
  return (Object.keys(a) as (keyof Row)[]).every(key => a[key] === b[key]);
}
