import React from 'react';
import { type Shown, stateIcons } from './icons';

/**
 * The icon of a state, for places with many icons.
 *
 * JupyterLab's icons parse their SVG at each render, and another state is another component. Here
 * only one attribute changes.
 */
export function StateIcon(props: { shown: Shown }): React.JSX.Element {
  return (
    <svg className="jp-Sing-stateIcon" viewBox="0 0 16 16" aria-hidden="true">
      <path className="jp-icon3" fill="#616161" {...shapeOf(props.shown)} />
    </svg>
  );
}

type Shape = Pick<React.SVGProps<SVGPathElement>, 'd' | 'fillRule' | 'transform'>;

/** Return the single path of a state's icon. */
function shapeOf(shown: Shown): Shape {
  return (shapes[shown] ??= readShape(stateIcons[shown].svgstr));
}

function readShape(svg: string): Shape {
  const path = new DOMParser().parseFromString(svg, 'image/svg+xml').querySelector('path');
  const read = (name: string) => path?.getAttribute(name) ?? undefined;
  const fillRule = read('fill-rule') as Shape['fillRule'];
  return { d: read('d'), fillRule, transform: read('transform') };
}

const shapes: Partial<Record<Shown, Shape>> = {};
