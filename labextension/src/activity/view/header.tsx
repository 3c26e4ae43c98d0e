import type { TranslationBundle } from '@jupyterlab/translation';
import { addIcon, fastForwardIcon, type LabIcon, tableRowsIcon } from '@jupyterlab/ui-components';
import React from 'react';
import { stateIcons } from '../../ui/icons';
import { minusIcon } from './icons';
import { SECONDS_MIN } from '../data/range';
import { DAY } from '../data/data';

const PRESETS = [300, 3600, 6 * 3600, DAY];

interface IHeaderProps {
  seconds: number;
  follows: boolean;
  isTable: boolean;
  /** The time that is shown, in words. */
  text: string;
  /** Why the shown data is old; empty if it is not. */
  problem: string;
  onPreset: (seconds: number) => void;
  onZoom: (factor: number) => void;
  onFollow: () => void;
  onTable: () => void;
  onRetry: () => void;
  trans: TranslationBundle;
}

/** Controls of the view: time range, zoom, and chart or table. */
export function Header(props: IHeaderProps): React.ReactElement {
  const { seconds, follows, isTable, trans } = props;
  const names = [trans.__('5 min'), trans.__('1 h'), trans.__('6 h'), trans.__('24 h')];
  return (
    <div className="jp-SingActivity-header" role="group" aria-label={trans.__('GPU activity')}>
      <div className="jp-SingActivity-group" role="group" aria-label={trans.__('Time shown')}>
        {PRESETS.map((preset, index) => (
          <button
            key={preset}
            type="button"
            aria-pressed={Math.abs(seconds - preset) < 1}
            onClick={() => props.onPreset(preset)}
          >
            {names[index]}
          </button>
        ))}
      </div>
      <div className="jp-SingActivity-group" role="group" aria-label={trans.__('Zoom')}>
        <IconButton
          icon={minusIcon}
          label={trans.__('Zoom out (-)')}
          isDisabled={seconds >= DAY}
          onClick={() => props.onZoom(2)}
        />
        <IconButton
          icon={addIcon}
          label={trans.__('Zoom in (+)')}
          isDisabled={seconds <= SECONDS_MIN}
          onClick={() => props.onZoom(0.5)}
        />
      </div>
      <div className="jp-SingActivity-group">
        <button
          type="button"
          aria-pressed={follows}
          title={trans.__('Show the latest activity as it happens')}
          onClick={props.onFollow}
        >
          <fastForwardIcon.react tag="span" className="jp-SingActivity-icon" />
          {trans.__('Live')}
        </button>
      </div>
      <div className="jp-SingActivity-time">{props.text}</div>
      <div className="jp-SingActivity-problem" role="status">
        {props.problem && (
          <>
            <stateIcons.failed.react tag="span" className="jp-SingActivity-icon" />
            <span className="jp-SingActivity-cut" title={props.problem}>
              {props.problem}
            </span>
            <button type="button" onClick={props.onRetry}>
              {trans.__('Retry')}
            </button>
          </>
        )}
      </div>
      <div className="jp-SingActivity-group">
        <button type="button" aria-pressed={isTable} onClick={props.onTable}>
          <tableRowsIcon.react tag="span" className="jp-SingActivity-icon" />
          {trans.__('Show as table')}
        </button>
      </div>
    </div>
  );
}

function IconButton(props: {
  icon: LabIcon;
  label: string;
  isDisabled: boolean;
  onClick: () => void;
}): React.ReactElement {
  const { icon, label, isDisabled, onClick } = props;
  return (
    <button type="button" title={label} aria-label={label} disabled={isDisabled} onClick={onClick}>
      <icon.react tag="span" className="jp-SingActivity-icon" />
    </button>
  );
}
