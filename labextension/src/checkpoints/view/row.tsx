import type { TranslationBundle } from '@jupyterlab/translation';
import {
  type LabIcon,
  addIcon,
  caretDownIcon,
  caretRightIcon,
  deleteIcon,
  historyIcon,
  kernelIcon,
  listIcon,
  userIcon
} from '@jupyterlab/ui-components';
import React from 'react';
import { checkpointIcon, stateIcons } from '../../ui/icons';
import type { Checkpoint } from '../../api/tokens';
import { bytesText } from '../../text/format';
import { Bar } from './bar';
import { Details } from './details';
import { holdsProcess, isSound, notebookName } from '../list';
import type { IArriving, IDoing } from '../store';
import {
  ageText,
  contentsText,
  formText,
  formTitle,
  howText,
  howTitle,
  labelText,
  leftOutText,
  momentText,
  sizeTitle
} from '../texts';

/** Actions on a row. */
export interface IRowActions {
  readonly toggle: (name: string) => void;
  readonly select: (name: string, selected: boolean) => void;
  readonly restore: (checkpoint: Checkpoint) => void;
  readonly restoreIntoNew: (checkpoint: Checkpoint) => void;
  readonly remove: (checkpoint: Checkpoint) => void;
  readonly openNotebook: (path: string) => void;
}

interface IRow {
  readonly checkpoint: Checkpoint;
  readonly doing: IDoing | null;
  /** True if it is the row that the tab key reaches. */
  readonly isCurrent: boolean;
  readonly isSelected: boolean;
  readonly isExpanded: boolean;
  /** The notebook into which it can be restored. */
  readonly where: string | null;
  readonly actions: IRowActions;
  readonly trans: TranslationBundle;
}

/** A checkpoint and, if expanded, its contents. */
export function Row(row: IRow): React.JSX.Element {
  const { checkpoint, doing, isCurrent, isExpanded, isSelected, actions, trans } = row;
  const { name } = checkpoint;
  const sound = isSound(checkpoint);
  return (
    <>
      <tr
        role="row"
        aria-level={1}
        aria-label={rowText(checkpoint, trans)}
        aria-expanded={isExpanded}
        aria-selected={isSelected}
        aria-busy={doing !== null}
        className={`jp-Sing-checkpoint${isSelected ? ' jp-mod-selected' : ''}`}
        data-name={name}
        tabIndex={isCurrent ? 0 : -1}
      >
        <td role="gridcell" className="jp-Sing-checkpointMark">
          <input
            type="checkbox"
            checked={isSelected}
            tabIndex={isCurrent ? 0 : -1}
            aria-label={trans.__('Select %1', name)}
            onChange={event => actions.select(name, event.target.checked)}
          />
        </td>
        <td role="gridcell" className="jp-Sing-checkpointName" colSpan={sound ? 1 : 6}>
          <button
            className="jp-Sing-checkpointCaret"
            tabIndex={-1}
            aria-hidden="true"
            title={isExpanded ? trans.__('Hide contents') : trans.__('Show contents')}
            onClick={() => actions.toggle(name)}
          >
            {isExpanded ? <caretDownIcon.react tag="span" /> : <caretRightIcon.react tag="span" />}
          </button>
          <div>
            <div className="jp-Sing-checkpointTitle" title={name}>
              {name}
            </div>
            <div className="jp-Sing-checkpointFacts">
              {doing?.isLong ? (
                <Bar done={doing.done} label={doingText(doing, trans)} />
              ) : (
                <Contents checkpoint={checkpoint} trans={trans} />
              )}
            </div>
          </div>
        </td>
        {sound && <Cells checkpoint={checkpoint} trans={trans} />}
        <td role="gridcell" className="jp-Sing-checkpointActions">
          <div>
            <Actions {...row} />
          </div>
        </td>
      </tr>
      {isExpanded && (
        <tr role="row" aria-level={2} className="jp-Sing-checkpointDetails">
          <td role="gridcell" colSpan={8}>
            <Details checkpoint={checkpoint} openNotebook={actions.openNotebook} trans={trans} />
          </td>
        </tr>
      )}
    </>
  );
}

/** Cells of a readable checkpoint. */
function Cells({
  checkpoint,
  trans
}: {
  readonly checkpoint: Checkpoint;
  readonly trans: TranslationBundle;
}): React.JSX.Element {
  return (
    <>
      <td role="gridcell" className="jp-Sing-checkpointNotebook">
        <span title={checkpoint.notebook || checkpoint.session}>{notebookName(checkpoint)}</span>
      </td>
      <td role="gridcell" className="jp-Sing-checkpointMade">
        <time dateTime={checkpoint.created} title={momentText(checkpoint)}>
          {ageText(checkpoint)}
        </time>
      </td>
      <td role="gridcell" className="jp-Sing-checkpointHow">
        <Word
          icon={checkpoint.automatic ? historyIcon : userIcon}
          text={howText(checkpoint, trans)}
          title={howTitle(checkpoint, trans)}
        />
      </td>
      <td role="gridcell" className="jp-Sing-checkpointForm">
        <Word
          icon={holdsProcess(checkpoint) ? kernelIcon : listIcon}
          text={formText(checkpoint, trans)}
          title={formTitle(checkpoint, trans)}
        />
      </td>
      <td role="gridcell" className="jp-Sing-checkpointSize">
        <div title={sizeTitle(checkpoint, trans)}>
          {bytesText(checkpoint.exclusive ?? 0)}
          <div className="jp-Sing-checkpointFacts">
            {trans.__('of %1', bytesText(checkpoint.stored ?? 0))}
          </div>
        </div>
      </td>
    </>
  );
}

/** A checkpoint that is being saved. */
export function ArrivingRow({
  arriving,
  doing,
  trans
}: {
  readonly arriving: IArriving;
  readonly doing: IDoing | null;
  readonly trans: TranslationBundle;
}): React.JSX.Element {
  return (
    <tr role="row" aria-level={1} aria-busy="true" className="jp-Sing-checkpoint jp-mod-arriving">
      <td role="gridcell" className="jp-Sing-checkpointMark" />
      <td role="gridcell" className="jp-Sing-checkpointName">
        <span className="jp-Sing-checkpointCaret">
          <checkpointIcon.react tag="span" />
        </span>
        <div>
          <div className="jp-Sing-checkpointTitle">{arriving.name}</div>
          <div className="jp-Sing-checkpointFacts">
            <Bar done={doing?.done ?? null} label={trans.__('Saving')} />
          </div>
        </div>
      </td>
      <td role="gridcell" className="jp-Sing-checkpointNotebook">
        <span title={arriving.session}>{arriving.session.split('/').pop()}</span>
      </td>
      <td role="gridcell" colSpan={5} />
    </tr>
  );
}

function Contents({
  checkpoint,
  trans
}: {
  readonly checkpoint: Checkpoint;
  readonly trans: TranslationBundle;
}): React.JSX.Element {
  const text = contentsText(checkpoint, trans);
  const leftOut = leftOutText(checkpoint, trans);
  if (!isSound(checkpoint)) {
    return <Word icon={stateIcons.failed} text={text} title={text} />;
  }
  return (
    <span>
      {text}
      {leftOut && (
        <>
          {' · '}
          <Word
            icon={stateIcons.failed}
            text={leftOut}
            title={trans.__('Expand the row to see what was not saved, and why')}
          />
        </>
      )}
    </span>
  );
}

function Actions(row: IRow): React.JSX.Element {
  const { checkpoint, doing, isCurrent, where, actions, trans } = row;
  const common = { isReachable: isCurrent, isEnabled: doing === null };
  return (
    <>
      {isSound(checkpoint) && (
        <>
          <Action
            {...common}
            isEnabled={common.isEnabled && where !== null}
            icon={stateIcons.restoring}
            text={trans.__('Restore')}
            title={
              where
                ? trans.__('Restore %1 into %2', checkpoint.name, where)
                : trans.__('First open the notebook into which to restore')
            }
            onClick={() => actions.restore(checkpoint)}
          />
          <Action
            {...common}
            icon={addIcon}
            text={trans.__('In new notebook')}
            isLesser
            title={trans.__('Restore %1 into a new notebook', checkpoint.name)}
            onClick={() => actions.restoreIntoNew(checkpoint)}
          />
        </>
      )}
      <Action
        {...common}
        icon={deleteIcon}
        title={trans.__('Delete %1', checkpoint.name)}
        onClick={() => actions.remove(checkpoint)}
      />
    </>
  );
}

interface IAction {
  readonly icon: LabIcon;
  readonly text?: string;
  /** True if there is less room for its text. */
  readonly isLesser?: boolean;
  readonly title: string;
  readonly isEnabled: boolean;
  readonly isReachable: boolean;
  readonly onClick: () => void;
}

function Action(action: IAction): React.JSX.Element {
  return (
    <button
      className="jp-Sing-action"
      title={action.title}
      aria-label={action.title}
      disabled={!action.isEnabled}
      tabIndex={action.isReachable ? 0 : -1}
      onClick={action.onClick}
    >
      <action.icon.react tag="span" />
      {action.text && (
        <span className={`jp-Sing-actionText${action.isLesser ? ' jp-mod-lesser' : ''}`}>
          {action.text}
        </span>
      )}
    </button>
  );
}

function Word({
  icon: Icon,
  text,
  title
}: {
  readonly icon: LabIcon;
  readonly text: string;
  readonly title: string;
}): React.JSX.Element {
  return (
    <span className="jp-Sing-word" title={title}>
      <Icon.react tag="span" />
      {text}
    </span>
  );
}

function doingText(doing: IDoing, trans: TranslationBundle): string {
  switch (doing.verb) {
    case 'checkpoint':
      return trans.__('Saving');
    case 'restore':
      return trans.__('Restoring');
    case 'delete':
      return trans.__('Deleting');
  }
}

/** Text of a row for screen readers: all that its cells show. */
function rowText(checkpoint: Checkpoint, trans: TranslationBundle): string {
  const texts = [checkpoint.name, contentsText(checkpoint, trans)];
  if (isSound(checkpoint)) {
    texts.push(
      leftOutText(checkpoint, trans),
      labelText(checkpoint, trans),
      howText(checkpoint, trans),
      formText(checkpoint, trans),
      trans.__('deleting frees %1', bytesText(checkpoint.exclusive ?? 0))
    );
  }
  return texts.filter(Boolean).join(', ');
}
