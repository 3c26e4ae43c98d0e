/** Colours and fonts of the theme, as a canvas needs them. */
export interface ITheme {
  sessions: readonly string[];
  text: string;
  faint: string;
  line: string;
  grid: string;
  ground: string;
  accent: string;
  error: string;
  font: string;
}

/** Number of session colours in a theme. */
export const COLOURS = 7;

/** Read the theme in effect for an element. */
export function themeOf(element: Element): ITheme {
  const style = getComputedStyle(element);
  const read = (name: string) => style.getPropertyValue(`--jp-${name}`).trim() || 'gray';
  return {
    // Colours that JupyterLab uses for collaborators: of equal brightness, and with text on them.
    sessions: Array.from({ length: COLOURS }, (_, index) => read(`collaborator-color${index + 1}`)),
    text: read('ui-font-color1'),
    faint: read('ui-font-color2'),
    line: read('border-color1'),
    grid: read('border-color2'),
    ground: read('layout-color1'),
    accent: read('brand-color1'),
    error: read('error-color1'),
    font: style.getPropertyValue('--jp-ui-font-family').trim() || 'sans-serif'
  };
}
