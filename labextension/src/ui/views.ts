import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { MainAreaWidget } from '@jupyterlab/apputils';
import { TabPanel } from '@lumino/widgets';

/**
 * Show a view in the main area, or below it if the main area holds only one document, as in
 * Notebook 7. A view that is already shown stays in its place.
 */
export function showView(shell: JupyterFrontEnd.IShell, view: MainAreaWidget, type: string): void {
  if (view.parent === null) {
    shell.add(view, 'main', { type });
  }
  if (view.parent === null) {
    view.content.addClass('jp-Sing-below'); // otherwise its minimum height is that of its content
    shell.add(view, 'down', { type });
  }
  shell.activateById(view.id);
  const tabs = view.parent?.parent;
  if (tabs instanceof TabPanel) {
    tabs.currentWidget = view; // shells do not do this in that area
  }
}
