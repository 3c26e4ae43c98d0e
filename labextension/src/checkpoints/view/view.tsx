import { PathExt } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';
import {
  FilterBox,
  ToolbarButtonComponent,
  caretDownIcon,
  caretUpIcon,
  deleteIcon,
  refreshIcon
} from '@jupyterlab/ui-components';
import React, { useEffect, useRef, useState } from 'react';
import { checkpointIcon, stateIcons } from '../../ui/icons';
import type { Checkpoint } from '../../api/tokens';
import type { CheckpointActions } from '../actions';
import { Track } from './bar';
import { type IOrder, NEWEST_FIRST, type SortKey, arranged, clicked, isOf } from '../list';
import type { INotebooks } from '../notebooks';
import { ArrivingRow, type IRowActions, Row } from './row';
import type { CheckpointStore } from '../store';
import { selectionText, totalText } from '../texts';

export interface IView {
  readonly store: CheckpointStore;
  readonly actions: CheckpointActions;
  readonly notebooks: INotebooks;
  readonly openNotebook: (path: string) => void;
  /** Makes a checkpoint of the current notebook, if it has a session. */
  readonly make: (() => void) | null;
  readonly trans: TranslationBundle;
}

/** All checkpoints, and the actions on them. */
export function View(view: IView): React.JSX.Element {
  const { store, actions, notebooks, trans } = view;
  const [text, setText] = useState('');
  const [isOnlyHere, setOnlyHere] = useState(false);
  const [order, setOrder] = useState<IOrder>(NEWEST_FIRST);
  const [selected, setSelected] = useState<ReadonlySet<string>>(new Set());
  const [expanded, setExpanded] = useState<ReadonlySet<string>>(new Set());
  const [current, setCurrent] = useState('');
  const body = useRef<HTMLTableSectionElement>(null);
  const wanted = useRef<string | null>(null); // the row that is to receive the focus

  const here = notebooks.current;
  const where = here?.kernelId ? PathExt.basename(here.path) : null;
  const shown = arranged(store.all, { text, of: isOnlyHere ? here : null }, order);
  const chosen = shown.filter(each => selected.has(each.name));
  const tabbed = shown.some(each => each.name === current) ? current : shown[0]?.name;

  useEffect(() => {
    if (wanted.current !== null) {
      focusRow(body.current, wanted.current);
      wanted.current = null;
    }
  });

  const remove = async (checkpoints: readonly Checkpoint[]) => {
    const left = shown.filter(each => !checkpoints.includes(each));
    const at = shown.indexOf(checkpoints[0]);
    const next = left[Math.min(at, left.length - 1)]?.name;
    const had = body.current?.contains(document.activeElement);
    if ((await actions.delete(checkpoints)) && had && next) {
      wanted.current = next;
      setCurrent(next);
    }
  };
  const rowActions: IRowActions = {
    toggle: name => setExpanded(toggled(expanded, name, !expanded.has(name))),
    select: (name, on) => setSelected(toggled(selected, name, on)),
    restore: checkpoint => here && void actions.restore(checkpoint, here),
    restoreIntoNew: checkpoint => void actions.restoreIntoNew(checkpoint),
    remove: checkpoint => void remove([checkpoint]),
    openNotebook: view.openNotebook
  };

  const onKeyDown = (event: React.KeyboardEvent) => {
    const row = (event.target as HTMLElement).closest<HTMLElement>('tr[data-name]');
    const name = row?.dataset.name;
    const checkpoint = shown.find(each => each.name === name);
    if (!row || !checkpoint || event.altKey || event.metaKey || event.shiftKey) {
      return;
    }
    const isRow = event.target === row;
    const at = shown.indexOf(checkpoint);
    const to = TO[event.key]?.(at, shown.length - 1);
    if (event.ctrlKey) {
      if (event.key !== 'a') {
        return;
      }
      setSelected(new Set(shown.map(each => each.name)));
    } else if (to !== undefined) {
      focusRow(body.current, shown[to].name);
    } else if (event.key === 'Delete') {
      void remove(selected.has(checkpoint.name) ? chosen : [checkpoint]);
    } else if (isRow && event.key === 'Enter') {
      rowActions.toggle(checkpoint.name);
    } else if (isRow && (event.key === 'ArrowRight' || event.key === 'ArrowLeft')) {
      setExpanded(toggled(expanded, checkpoint.name, event.key === 'ArrowRight'));
    } else if (isRow && event.key === ' ') {
      rowActions.select(checkpoint.name, !selected.has(checkpoint.name));
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  };

  const sortable = (key: SortKey, label: string, title?: string) => (
    <Column
      {...{ label, title, order, trans }}
      sort={key}
      onSort={() => setOrder(clicked(order, key))}
    />
  );

  return (
    <div className="jp-Sing-checkpoints">
      <div className="jp-Sing-checkpointsBar">
        <FilterBox
          placeholder={trans.__('Name, notebook or variable')}
          updateFilter={(_, query) => setText(query ?? '')}
          useFuzzyFilter={false}
          caseSensitive={false}
        />
        <label className="jp-Sing-checkpointsHere" title={here?.path}>
          <input
            type="checkbox"
            checked={isOnlyHere && here !== null}
            disabled={here === null}
            onChange={event => setOnlyHere(event.target.checked)}
          />
          <span>
            {here
              ? trans.__('Only %1', PathExt.basename(here.path))
              : trans.__('This notebook only')}
          </span>
        </label>
        <Status {...view} shown={shown} chosen={chosen} />
        <ToolbarButtonComponent
          icon={checkpointIcon}
          label={trans.__('Save checkpoint')}
          tooltip={
            where
              ? trans.__('Save checkpoint of %1', where)
              : trans.__('First open a notebook with a GPU session')
          }
          enabled={view.make !== null}
          onClick={() => view.make?.()}
        />
        <ToolbarButtonComponent
          icon={deleteIcon}
          tooltip={trans.__('Delete selected')}
          enabled={chosen.length > 0}
          onClick={() => void remove(chosen)}
        />
        <ToolbarButtonComponent
          icon={refreshIcon}
          tooltip={trans.__('Refresh')}
          onClick={() => void store.refresh()}
        />
        <div className="jp-Sing-checkpointsWorking">
          {store.working && <Track done={store.working.done} label={trans.__('Please wait')} />}
        </div>
      </div>
      <div className="jp-Sing-checkpointsScroll">
        <table
          role="treegrid"
          aria-label={trans.__('Checkpoints')}
          aria-multiselectable="true"
          aria-busy={!store.isReady}
          onKeyDown={onKeyDown}
          onFocus={event => {
            const row = event.target.closest<HTMLElement>('tr[data-name]');
            setCurrent(row?.dataset.name ?? current);
          }}
        >
          <thead>
            <tr role="row">
              <th role="columnheader" className="jp-Sing-checkpointMark">
                <input
                  type="checkbox"
                  aria-label={trans.__('Select all')}
                  disabled={shown.length === 0}
                  checked={shown.length > 0 && chosen.length === shown.length}
                  onChange={({ target }) =>
                    setSelected(new Set(target.checked ? shown.map(each => each.name) : []))
                  }
                />
              </th>
              {sortable('name', trans.__('Name'))}
              {sortable('notebook', trans.__('Notebook'))}
              {sortable('created', trans.__('Created'))}
              {sortable('how', trans.__('Created by'))}
              {sortable('form', trans.__('Saved as'))}
              {sortable(
                'size',
                trans.__('Size'),
                trans.__('Space that deleting it frees, and its total size on disk')
              )}
              <th role="columnheader" className="jp-Sing-checkpointActions">
                <span className="jp-Sing-unseen">{trans.__('Actions')}</span>
              </th>
            </tr>
          </thead>
          <tbody ref={body}>
            {store.arriving
              .filter(each => !text || each.name.toLowerCase().includes(text.toLowerCase()))
              .map(each => (
                <ArrivingRow
                  key={each.name}
                  arriving={each}
                  doing={store.doing(each.name)}
                  trans={trans}
                />
              ))}
            {shown.map(each => (
              <Row
                key={each.name}
                checkpoint={each}
                doing={store.doing(each.name)}
                isCurrent={each.name === tabbed}
                isSelected={selected.has(each.name)}
                isExpanded={expanded.has(each.name)}
                where={where}
                actions={rowActions}
                trans={trans}
              />
            ))}
          </tbody>
        </table>
        {shown.length === 0 && store.arriving.length === 0 && (
          <Nothing
            {...view}
            isFiltered={store.all.length > 0}
            isHere={here !== null && !store.all.some(each => isOf(each, here)) && isOnlyHere}
          />
        )}
      </div>
    </div>
  );
}

/** Number of checkpoints, or why it is not known. */
function Status({
  store,
  shown,
  chosen,
  trans
}: IView & {
  readonly shown: readonly Checkpoint[];
  readonly chosen: readonly Checkpoint[];
}): React.JSX.Element {
  return (
    <span className="jp-Sing-checkpointsStatus" role="status">
      {store.problem ? (
        <span className="jp-Sing-word" title={store.problem}>
          <stateIcons.failed.react tag="span" />
          {store.problem}
        </span>
      ) : store.all.length === 0 ? (
        ''
      ) : chosen.length > 0 ? (
        selectionText(chosen, trans)
      ) : (
        totalText(shown, trans)
      )}
    </span>
  );
}

/** Text in place of an empty list. */
function Nothing({
  store,
  isFiltered,
  isHere,
  trans
}: IView & { readonly isFiltered: boolean; readonly isHere: boolean }): React.JSX.Element {
  if (!store.isReady) {
    return (
      <div className="jp-Sing-checkpointsNothing">
        {store.problem ? (
          <p>{store.problem}</p>
        ) : (
          <p className="jp-mod-late">{trans.__('Loading checkpoints')}</p>
        )}
      </div>
    );
  }
  if (isFiltered && !isHere) {
    return (
      <div className="jp-Sing-checkpointsNothing">
        <p>{trans.__('No checkpoint matches.')}</p>
      </div>
    );
  }
  return (
    <div className="jp-Sing-checkpointsNothing">
      <checkpointIcon.react tag="span" width="48px" height="48px" />
      <h2>
        {isHere ? trans.__('No checkpoint of this notebook yet') : trans.__('No checkpoint yet')}
      </h2>
      <p>
        {trans.__(
          'A checkpoint saves the current state of a notebook: variables, GPU memory, changed files and, where possible, the whole process.'
        )}
      </p>
      <p>
        {trans.__(
          'Run “%sing checkpoint” in a cell to save one, or “%sing auto 10m” to save one every 10 minutes.'
        )}
      </p>
    </div>
  );
}

function Column({
  label,
  title,
  sort,
  order,
  onSort
}: {
  readonly label: string;
  readonly title?: string;
  readonly sort: SortKey;
  readonly order: IOrder;
  readonly onSort: () => void;
}): React.JSX.Element {
  const isSorted = order.key === sort;
  const Caret = order.descending ? caretDownIcon : caretUpIcon;
  return (
    <th
      role="columnheader"
      className={`jp-Sing-column-${sort}`}
      aria-sort={isSorted ? (order.descending ? 'descending' : 'ascending') : 'none'}
    >
      <button onClick={onSort} title={title}>
        {label}
        <span className="jp-Sing-columnCaret">{isSorted && <Caret.react tag="span" />}</span>
      </button>
    </th>
  );
}

/** Target rows of navigation keys. */
const TO: Record<string, (at: number, last: number) => number> = {
  ArrowDown: (at, last) => Math.min(at + 1, last),
  ArrowUp: at => Math.max(at - 1, 0),
  PageDown: (at, last) => Math.min(at + 10, last),
  PageUp: at => Math.max(at - 10, 0),
  Home: () => 0,
  End: (_, last) => last
};

function focusRow(body: HTMLElement | null, name: string): void {
  const rows = [...(body?.querySelectorAll<HTMLElement>('tr[data-name]') ?? [])];
  rows.find(each => each.dataset.name === name)?.focus();
}

function toggled(set: ReadonlySet<string>, name: string, on: boolean): ReadonlySet<string> {
  const result = new Set(set);
  if (on) {
    result.add(name);
  } else {
    result.delete(name);
  }
  return result;
}
