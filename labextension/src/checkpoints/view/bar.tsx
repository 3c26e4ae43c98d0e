import React from 'react';

/** A progress bar with a word beside it; without a known progress, it is only animated. */
export function Bar({
  done,
  label
}: {
  readonly done: number | null;
  readonly label: string;
}): React.JSX.Element {
  const percent = done === null ? undefined : Math.floor(100 * done);
  return (
    <span className="jp-Sing-bar">
      <span>{label}</span>
      <Track done={done} label={label} />
      <span className="jp-Sing-barShare">{percent === undefined ? '' : `${percent} %`}</span>
    </span>
  );
}

/** The bar without the word. */
export function Track({
  done,
  label
}: {
  readonly done: number | null;
  readonly label: string;
}): React.JSX.Element {
  const percent = done === null ? undefined : Math.floor(100 * done);
  return (
    <span
      role="progressbar"
      aria-label={label}
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuenow={percent}
      className={`jp-Sing-track${percent === undefined ? ' jp-mod-unknown' : ''}`}
    >
      <span style={percent === undefined ? undefined : { width: `${percent}%` }} />
    </span>
  );
}
