import { LabIcon } from '@jupyterlab/ui-components';
import type { SessionState } from '../api/tokens';

/**
 * What is shown for a session: its state, that its kernel has no session, or that the server is
 * unreachable.
 */
export type Shown = SessionState | 'cpu' | 'unreachable';

// Shapes of 16 by 16 that can be distinguished without colours; `jp-icon3` follows the theme.
const SHAPES: Record<Shown, string> = {
  running: '<path d="M4 2.5v11l9.5-5.5z"/>',
  idle: '<path d="M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2zm0 1.5a4.5 4.5 0 1 1 0 9 4.5 4.5 0 0 1 0-9z"/>',
  queued:
    '<path d="M4 1.5h8V3h-.8v1.7L8.9 8l2.3 3.3V13h.8v1.5H4V13h.8v-1.7L7.1 8 4.8 4.7V3H4zM6.3 3v1.2L8 6.7l1.7-2.5V3z"/>',
  suspended: '<path d="M4 2.5h3v11H4zm5 0h3v11H9z"/>',
  restoring:
    '<path d="M8 2v2.2l3.4-3L8-1.6V.5A7.5 7.5 0 1 0 15.5 8H14A6 6 0 1 1 8 2z" transform="translate(0 .8) scale(.94)"/>',
  migrating:
    '<path d="M1.5 4.2h9V1.8L15 5.4 10.5 9V6.400h-9zM14.5 11.800h-9v2.400L1 10.6 5.5 7v2.600h9z"/>',
  preparing: '<path d="M2.500 6.500h3v3h-3zm4 0h3v3h-3zm4 0h3v3h-3z"/>',
  failed:
    '<path d="M8 1.2 15.2 14H.8zM7.2 6v4h1.600V6zm0 5.200v1.600h1.600v-1.600z" fill-rule="evenodd"/>',
  unreachable:
    '<path d="M2 14 14 2l1 1L3 15zM1 6a10 10 0 0 1 8.500-2.900L8 4.600A8.500 8.500 0 0 0 2 7zM4 9a6 6 0 0 1 2.500-1.500L4.600 9.800zM12.500 3.900A10 10 0 0 1 15 6l-1 1a8.500 8.500 0 0 0-2.600-2z"/>',
  cpu: '<path d="M2.5 4h11v8h-11zM4 5.500v5h8v-5zM3 14h10v1.200H3z" fill-rule="evenodd"/>'
};

/** An icon for each state. */
export const stateIcons = Object.fromEntries(
  Object.entries(SHAPES).map(([state, shape]) => [state, icon(`state-${state}`, shape)])
) as Record<Shown, LabIcon>;

/** A device: a board with a fan. */
export const deviceIcon = icon(
  'device',
  '<path d="M1 3h1.500v1H15v8H2.500v2H1zm1.5 2.300v5.400h11.200V5.300zM8 6a2 2 0 1 1 0 4 2 2 0 0 1 0-4z" fill-rule="evenodd"/>'
);

/** Bars of different lengths: a timeline. */
export const activityIcon = icon(
  'activity',
  '<path d="M1 2.500h6V5H1zm4 4.200h10v2.500H5zM2.5 11H11v2.500H2.500z"/>'
);

/** A box, for checkpoints. */
export const checkpointIcon = icon(
  'checkpoint',
  '<path d="M1.5 2h13v4h-1v8h-11V6h-1zM3 3.500v1h10v-1zM4 6v6.500h8V6zm2 1.500h4V9H6z" fill-rule="evenodd"/>'
);

/** An arrow out of a box, for use of a device outside of sessions. */
export const outsideIcon = icon(
  'outside',
  '<path d="M2 3h5v1.500H3.500v8h8V9H13v5H2zm7-1h5v5h-1.500V4.560L8 9.060 6.940 8l4.500-4.500H9z"/>'
);

export const pinIcon = icon(
  'pin',
  '<path d="M5 1.500h6V3h-1v4l2 2v1.500H8.700V15H7.300v-4.500H4V9l2-2V3H5z"/>'
);

export function icon(name: string, shape: string): LabIcon {
  return new LabIcon({
    name: `jupyter_sing:${name}`,
    svgstr:
      '<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 16 16">' +
      `<g class="jp-icon3" fill="#616161">${shape}</g></svg>`
  });
}
