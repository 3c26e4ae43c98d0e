import type { TranslationBundle } from '@jupyterlab/translation';
import { treeViewIcon } from '@jupyterlab/ui-components';
import React, { useCallback, useEffect, useRef, useSyncExternalStore } from 'react';
import { deviceIcon, outsideIcon, pinIcon } from '../ui/icons';
import { percentText } from '../text/format';
import { MemoryBar } from '../ui/memorybar';
import type { Rows } from './rows';
import { SessionName } from '../ui/sessionname';
import { StateIcon } from '../ui/stateicon';
import { CommandIDs } from '../api/tokens';

/** Texts of labels, for JupyterLab's search, which reads only the children of components. */
interface ISearched {
  children: string[];
}

/** Render again when the value read from the rows has changed. */
function useRow<T>(rows: Rows, read: () => T): T {
  const subscribe = useCallback(
    (onChange: () => void) => {
      rows.changed.connect(onChange);
      return () => void rows.changed.disconnect(onChange);
    },
    [rows]
  );
  return useSyncExternalStore(subscribe, read);
}

/** A device: its name, and its memory use. */
export function DeviceLabel(
  props: { rows: Rows; id: string; trans: TranslationBundle } & ISearched
): React.JSX.Element | null {
  const row = useRow(props.rows, () => props.rows.device(props.id));
  if (row === undefined) {
    return null;
  }
  return (
    <span className="jp-Sing-row">
      <deviceIcon.react className="jp-Sing-rowIcon" tag="span" />
      <span className="jp-Sing-rowName" title={props.id}>
        {row.name}
      </span>
      {row.failure && (
        <span className="jp-Sing-rowFailure" title={row.failure}>
          {props.trans.__('Out of use')}
        </span>
      )}
      {row.waiting > 0 && <Waiting count={row.waiting} trans={props.trans} />}
      <MemoryBar device={row.name} used={row.used} text={row.occupancy} trans={props.trans} />
      <span className="jp-Sing-rowOccupancy">{row.occupancy}</span>
      <span className="jp-Sing-rowPercent" title={row.occupancy} aria-hidden="true">
        {percentText(row.used / 100, props.trans)}
      </span>
    </span>
  );
}

/** Number of waiting sessions: in words if there is room, else with an icon. */
function Waiting(props: { count: number; trans: TranslationBundle }): React.JSX.Element {
  const text = props.trans.__('%1 waiting', props.count);
  return (
    <span className="jp-Sing-rowWaiting" title={text}>
      <StateIcon shown="queued" />
      <span className="jp-mod-short" aria-hidden="true">
        {props.count}
      </span>
      <span className="jp-mod-long">{text}</span>
    </span>
  );
}

/** A session: owner, state, what happens next, and a button for an action. */
export function SessionLabel(
  props: {
    rows: Rows;
    id: string;
    trans: TranslationBundle;
    withDevice: boolean;
    /** Whether it is below the row of its job, and only its rank is shown. */
    isNested: boolean;
    execute: (command: string) => void;
    open: (() => void) | undefined;
  } & ISearched
): React.JSX.Element | null {
  const { rows, id, trans, execute, open } = props;
  const row = useRow(rows, () => rows.session(id));
  const node = useOpenByKey(open);
  if (row === undefined) {
    return null;
  }
  return (
    <span
      className="jp-Sing-row"
      title={[row.name, row.sentence, row.device, row.memory].filter(Boolean).join(' · ')}
      ref={node}
    >
      <StateIcon shown={row.shown} />
      {props.isNested ? (
        <span className="jp-Sing-rowRank">{row.rank}</span>
      ) : (
        <SessionName className="jp-Sing-rowName" name={row.name} />
      )}
      {row.owner && row.name !== row.owner && !props.isNested && (
        <span className="jp-Sing-rowOwner" title={row.owner}>
          {row.owner}
        </span>
      )}
      <span className="jp-Sing-rowNext">{row.sentence}</span>
      {row.pinned && (
        <span role="img" aria-label={trans.__('Stays on its GPU')} className="jp-Sing-rowPin">
          <pinIcon.react tag="span" />
        </span>
      )}
      {props.withDevice && <span className="jp-Sing-rowDevice">{row.device}</span>}
      <span className="jp-Sing-rowWord">{row.word}</span>
      <span className="jp-Sing-rowMemory">{row.memory}</span>
      <Action action={row.action} name={row.name} trans={trans} execute={execute} />
    </span>
  );
}

/** The button of a session, if an action is possible. */
function Action(props: {
  action: 'suspend' | 'resume' | null;
  name: string;
  trans: TranslationBundle;
  execute: (command: string) => void;
}): React.JSX.Element | null {
  const { action, name, trans, execute } = props;
  if (action === null) {
    return null;
  }
  const suspends = action === 'suspend';
  return (
    <button
      className="jp-Sing-rowButton"
      title={suspends ? trans.__('Suspend') : trans.__('Resume')}
      aria-label={suspends ? trans.__('Suspend %1', name) : trans.__('Resume %1', name)}
      onClick={event => {
        event.stopPropagation(); // a click beside it opens the notebook
        execute(suspends ? CommandIDs.suspend : CommandIDs.resume);
      }}
    >
      <StateIcon shown={suspends ? 'suspended' : 'running'} />
    </button>
  );
}

/** A job: its name, the number of its ranks, where they are, and their memory. */
export function JobLabel(
  props: { rows: Rows; id: string; open: (() => void) | undefined } & ISearched
): React.JSX.Element | null {
  const row = useRow(props.rows, () => props.rows.job(props.id));
  const node = useOpenByKey(props.open);
  if (row === undefined) {
    return null;
  }
  const text = [row.count, row.place].filter(Boolean).join(' ');
  return (
    <span
      className="jp-Sing-row"
      title={[row.name, text, row.sentence, row.memory].filter(Boolean).join(' · ')}
      ref={node}
    >
      <treeViewIcon.react className="jp-Sing-rowIcon" tag="span" />
      <span className="jp-Sing-rowName">{row.name}</span>
      <span className="jp-Sing-rowWord">
        {row.count}
        {row.place && <span className="jp-Sing-rowPlace"> {row.place}</span>}
      </span>
      <span className="jp-Sing-rowMemory">{row.memory}</span>
    </span>
  );
}

/** A process that uses a device outside of sessions: its program, its user and its memory. */
export function OutsideLabel(
  props: { rows: Rows; id: string; trans: TranslationBundle } & ISearched
): React.JSX.Element | null {
  const row = useRow(props.rows, () => props.rows.outside(props.id));
  if (row === undefined) {
    return null;
  }
  return (
    <span className="jp-Sing-row" title={[row.sentence, row.owner].filter(Boolean).join(' · ')}>
      <outsideIcon.react className="jp-Sing-rowIcon" tag="span" />
      <span className="jp-Sing-rowName">{row.name}</span>
      {row.owner && <span className="jp-Sing-rowOwner">{row.owner}</span>}
      <span className="jp-Sing-rowNext">{row.sentence}</span>
      <span className="jp-Sing-rowWord">{props.trans.__('Outside')}</span>
      <span className="jp-Sing-rowMemory">{row.memory}</span>
    </span>
  );
}

/** An additional message, or one in place of the rows. */
export function NoteLabel({ rows }: { rows: Rows } & ISearched): React.JSX.Element {
  const note = useRow(rows, () => rows.note);
  return (
    <span className="jp-Sing-noteText" role="status">
      {note}
    </span>
  );
}

/**
 * Open the item around a label by Enter, too; the tree, which handles keys, does not do that.
 *
 * @returns A reference to the label.
 */
function useOpenByKey(open: (() => void) | undefined): React.RefObject<HTMLSpanElement> {
  const node = useRef<HTMLSpanElement>(null);
  const opens = useRef(open);
  opens.current = open;
  useEffect(() => {
    const item = node.current?.closest<HTMLElement>('.jp-RunningSessions-item');
    const onKey = (event: KeyboardEvent) => {
      if (event.key !== 'Enter' && event.key !== ' ') {
        return;
      }
      if (event.target !== item) {
        event.stopPropagation(); // the button's own key: the tree would handle it
      } else if (event.key === 'Enter') {
        opens.current?.();
      }
    };
    item?.addEventListener('keydown', onKey);
    return () => item?.removeEventListener('keydown', onKey);
  }, []);
  return node;
}
