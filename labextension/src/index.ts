import type { JupyterFrontEndPlugin } from '@jupyterlab/application';
import { core } from './core';

export * from './tokens';

const plugins: JupyterFrontEndPlugin<unknown>[] = [core];

export default plugins;
