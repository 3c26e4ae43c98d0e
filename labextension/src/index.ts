import type { JupyterFrontEndPlugin } from '@jupyterlab/application';
import { activity } from './activity/plugin';
import { checkpoints } from './checkpoints';
import { commands } from './commands';
import { core } from './core';
import { notices } from './notices';
import { pill } from './pill';
import { running } from './running';
import { statusBar } from './statusbar';

export * from './tokens';

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
