import type { TranslationBundle } from '@jupyterlab/translation';
import { Signal } from '@lumino/signaling';
import { isWaiting } from '../text/facts';
import type { Shown } from '../ui/icons';
import type { Device, ISingModel, Session } from '../api/tokens';
import { isMine, obstacle } from '../text/sessionactions';
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
}

/** A device and the sessions on it, or the sessions on no device. */
export interface IGroup {
  readonly device: string | null;
  readonly sessions: readonly { readonly id: string; readonly mine: boolean }[];
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

  device(id: string): IDeviceRow | undefined {
    return this._devices.get(id);
  }

  /** Searchable texts of a session's row. */
  searched(id: string): string[] {
    const row = this._sessions.get(id);
    return row ? [row.name, row.owner, row.word, row.device] : [];
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
    const waiting = new Map<string | null, number>();
    sessions
      .filter(isWaiting)
      .forEach(each => waiting.set(each.device, (waiting.get(each.device) ?? 0) + 1));
    this._devices = renewed(this._devices, devices, each =>
      this._deviceRow(each, waiting.get(each.id) ?? 0)
    );
    this._groups = this._grouped();
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
      sentence: stateSentence(session, trans),
      action: can('suspend') ? 'suspend' : can('resume') ? 'resume' : null
    };
  }

  private _deviceRow(device: Device, waiting: number): IDeviceRow {
    return {
      name: deviceName(device.id),
      used: usedPercent(device),
      occupancy: occupancyText(device),
      waiting
    };
  }

  private _grouped(): IGroup[] {
    const { devices, sessions } = this._model;
    const known = new Map(devices.map(each => [each.id, [] as Session[]]));
    const elsewhere: Session[] = [];
    sessions.forEach(each => (known.get(each.device ?? '') ?? elsewhere).push(each));
    const name = ({ id }: Session) => this._sessions.get(id)?.name ?? '';
    const group = (device: string | null, here: Session[]): IGroup => ({
      device,
      sessions: here
        .sort((a, b) => name(a).localeCompare(name(b)) || a.id.localeCompare(b.id))
        .map(each => ({ id: each.id, mine: isMine(each) }))
    });
    const groups = [...known].map(([device, here]) => group(device, here));
    return elsewhere.length > 0 ? [...groups, group(null, elsewhere)] : groups;
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
  private _devices: ReadonlyMap<string, IDeviceRow> = new Map();
  private _groups: readonly IGroup[] = [];
  private _note = '';
  private _shape = '';
}

/** Return the rows of the current items; rows with the same text are reused. */
function renewed<T extends { id: string }, Row extends object>(
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
