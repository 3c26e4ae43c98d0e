import type { LabIcon } from '@jupyterlab/ui-components';
import { checkpointIcon, icon, stateIcons } from '../../ui/icons';
import type { Kind } from '../data/data';

/** An arrow onto a disk. */
export const diskIcon = icon(
  'swapped-out',
  '<path d="M7.2 1h1.600v5.500H11.500L8 10.500 4.500 6.500H7.200zM1.500 9.500H3v4h10v-4h1.500V15h-13z"/>'
);

/** A cross, for lost state. */
export const lostIcon = icon(
  'lost',
  '<path d="M3.300 2 8 6.700 12.700 2 14 3.300 9.300 8 14 12.700 12.700 14 8 9.300 3.300 14 2 12.700 6.700 8 2 3.300z"/>'
);

export const minusIcon = icon('minus', '<path d="M3 7.200h10v1.600H3z"/>');

/** An icon for each kind of event. */
export const kindIcons: Record<Kind, LabIcon> = {
  suspended: stateIcons.suspended,
  resumed: stateIcons.running,
  swapped_out: diskIcon,
  migrated: stateIcons.migrating,
  checkpoint: checkpointIcon,
  restored: stateIcons.restoring,
  failed: stateIcons.failed,
  lost: lostIcon
};

const shapes = new Map<LabIcon, [Path2D, CanvasFillRule][]>();

/** Draw an icon of 16 by 16 in another size and colour. */
export function drawIcon(
  context: CanvasRenderingContext2D,
  icon: LabIcon,
  left: number,
  top: number,
  size: number,
  colour: string
): void {
  let paths = shapes.get(icon);
  if (paths === undefined) {
    const svg = new DOMParser().parseFromString(icon.svgstr, 'image/svg+xml');
    paths = Array.from(svg.querySelectorAll('path'), path => {
      const whole = new Path2D();
      const matrix = path.transform.baseVal.consolidate()?.matrix;
      whole.addPath(new Path2D(path.getAttribute('d') ?? ''), matrix);
      return [whole, path.getAttribute('fill-rule') === 'evenodd' ? 'evenodd' : 'nonzero'];
    });
    shapes.set(icon, paths);
  }
  context.save();
  context.translate(left, top);
  context.scale(size / 16, size / 16);
  context.fillStyle = colour;
  paths.forEach(([path, rule]) => context.fill(path, rule));
  context.restore();
}
