import type { JupyterFrontEnd } from '@jupyterlab/application';
import { MainAreaWidget } from '@jupyterlab/apputils';
import { DockPanel, TabPanel, Widget } from '@lumino/widgets';
import { expect, test, vi } from 'vitest';
import { showView } from './views';

function aShell(takes: { main: number }) {
  const areas = { main: new DockPanel(), down: new TabPanel() };
  const activateById = vi.fn();
  const add = (widget: Widget, area: 'main' | 'down') => {
    if (area === 'down' || takes.main-- > 0) {
      areas[area].addWidget(widget);
    }
  };
  return { areas, activateById, shell: { add, activateById } as unknown as JupyterFrontEnd.IShell };
}

function aView(id: string): MainAreaWidget {
  const view = new MainAreaWidget({ content: new Widget() });
  view.id = id;
  return view;
}

test('views open in the main area if it accepts them', () => {
  const { shell, areas, activateById } = aShell({ main: 9 });
  const view = aView('activity');
  showView(shell, view, 'Activity');
  showView(shell, view, 'Activity');
  expect([...areas.main.widgets()]).toEqual([view]);
  expect(areas.down.widgets).toEqual([]);
  expect(activateById.mock.calls).toEqual([['activity'], ['activity']]);
});

test('views open below a main area with one document, the requested one in front', () => {
  const { shell, areas } = aShell({ main: 0 });
  const [activity, checkpoints] = [aView('activity'), aView('checkpoints')];
  for (const view of [activity, checkpoints, activity]) {
    showView(shell, view, 'View');
    expect(areas.down.currentWidget).toBe(view);
  }
  expect(areas.down.widgets).toEqual([activity, checkpoints]);
  expect(activity.content.hasClass('jp-Sing-below')).toBe(true);
});
