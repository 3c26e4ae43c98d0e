import type { JupyterFrontEndPlugin } from '@jupyterlab/application';
import { activity } from './activity/plugin';
import { checkpoints } from './checkpoints';
import { commands } from './session/commands';
import { core } from './model/core';
import { notices } from './session/notices';
import { pill } from './session/pill';
import { running } from './running/running';
import { statusBar } from './session/statusbar';

export * from './api/tokens';

const plugins: JupyterFrontEndPlugin<unknown>[] = [
  core,
  commands,
  notices,
  running,
  pill,
  statusBar,
  activity,
  checkpoints
];

export default plugins;
