import type { TranslationBundle } from '@jupyterlab/translation';
import React from 'react';

/**
 * Use of a device's memory, as a bar.
 *
 * @param props - The device's name, the percentage in use, and the same in words.
 */
export function MemoryBar(props: {
  device: string;
  used: number;
  text: string;
  trans: TranslationBundle;
}): React.JSX.Element {
  return (
    <span
      className="jp-Sing-memoryBar"
      role="meter"
      aria-label={props.trans.__('Memory of %1 in use', props.device)}
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuenow={props.used}
      aria-valuetext={props.text}
    >
      <span style={{ width: `${props.used}%` }} />
    </span>
  );
}
