import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { MainAreaWidget } from '@jupyterlab/apputils';
import { TabPanel } from '@lumino/widgets';

/**
 * Show a view in the main area; where that takes one document and nothing else, as in Notebook 7,
 * below it. A view that is there already stays where it is.
 */
export function showView(shell: JupyterFrontEnd.IShell, view: MainAreaWidget, type: string): void {
  if (view.parent === null) {
    shell.add(view, 'main', { type });
  }
  if (view.parent === null) {
    view.content.addClass('jp-Sing-below'); // its own least height is that of what it holds
    shell.add(view, 'down', { type });
  }
  shell.activateById(view.id);
  const tabs = view.parent?.parent;
  if (tabs instanceof TabPanel) {
    tabs.currentWidget = view; // which shells do not do there
  }
}
