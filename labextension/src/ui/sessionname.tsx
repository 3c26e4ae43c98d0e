import * as React from 'react';
import { nameParts } from '../text/jobs';

/** The name of a session in a place that may be too narrow: a rank's number is never cut off. */
export function SessionName(props: { name: string; className?: string }): React.JSX.Element {
  const [program, rank] = nameParts(props.name);
  return (
    <span className={`jp-SingName ${props.className ?? ''}`}>
      <span>{program}</span>
      {rank && <span>{rank}</span>}
    </span>
  );
}
