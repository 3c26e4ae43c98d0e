import { PathExt } from '@jupyterlab/coreutils';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { KernelAPI, type ServiceManager } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';
import { type ISignal, Signal } from '@lumino/signaling';
import { SingError } from '../api/client';
import type { Checkpoint, ISingModel, Session } from '../api/tokens';
import type { INotebook } from './list';

/** Time limit for a kernel to start. */
const START_MS_MAX = 120_000;
/** Time limit until the session of an answering kernel is known. */
const SESSION_MS_MAX = 30_000;

/** Open notebooks, and new ones. */
export interface INotebooks {
  /** The most recently used one, if it is still open. */
  readonly current: INotebook | null;
  /** Emitted when `current` is another notebook, or has another kernel. */
  readonly changed: ISignal<INotebooks, void>;
  /**
   * Create a notebook beside that of a checkpoint: a copy, if the original still exists. Returns
   * its path.
   */
  create(checkpoint: Checkpoint): Promise<string>;
  /** Open a notebook and wait until its kernel answers. */
  start(path: string): Promise<INotebook>;
  /** Restart the kernel of a notebook. */
  restart(notebook: INotebook): Promise<void>;
}

/** The notebooks of JupyterLab. */
export class Notebooks implements INotebooks {
  /** @param open - Opens a notebook, with a new kernel if none is given. */
  constructor(
    private readonly _tracker: INotebookTracker | null,
    private readonly _services: ServiceManager.IManager,
    private readonly _open: (path: string, kernel: string | null) => Promise<NotebookPanel>,
    private readonly _trans: TranslationBundle
  ) {
    _tracker?.currentChanged.connect(this._follow, this);
    this._follow();
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get current(): INotebook | null {
    const panel = this._tracker?.currentWidget;
    return panel ? this._described(panel) : null;
  }

  async create(checkpoint: Checkpoint): Promise<string> {
    const { contents } = this._services;
    const directory = PathExt.dirname(checkpoint.path);
    if (checkpoint.path) {
      try {
        return (await contents.copy(checkpoint.path, directory)).path;
      } catch {
        // The original is gone, or cannot be read: use an empty notebook.
      }
    }
    const make = async (path: string) =>
      (await contents.newUntitled({ path, type: 'notebook' })).path;
    const path = await make(directory).catch(() => make(''));
    this._new.add(path);
    return path;
  }

  async start(path: string): Promise<INotebook> {
    const { kernelspecs } = this._services;
    const name = this._new.delete(path) ? (kernelspecs.specs?.default ?? null) : null;
    const panel = await this._open(path, name);
    const started = panel.context.ready.then(() => panel.sessionContext.ready);
    const answers = started.then(() => panel.sessionContext.session?.kernel?.info);
    await within(answers, START_MS_MAX, () =>
      this._trans.__(
        'The kernel of %1 does not respond. Restart it, then try again.',
        PathExt.basename(path)
      )
    );
    return this._described(panel);
  }

  async restart({ kernelId }: INotebook): Promise<void> {
    const isIts = (panel: NotebookPanel) => panel.sessionContext.session?.kernel?.id === kernelId;
    const kernel = this._tracker?.find(isIts)?.sessionContext.session?.kernel;
    await (kernel
      ? kernel.restart()
      : KernelAPI.restartKernel(kernelId ?? '', this._services.serverSettings));
  }

  private _described(panel: NotebookPanel): INotebook {
    return {
      path: this._services.contents.localPath(panel.context.path),
      kernelId: panel.sessionContext.session?.kernel?.id ?? null
    };
  }

  private _follow(): void {
    this._panel?.sessionContext.kernelChanged.disconnect(this._notify, this);
    this._panel?.context.pathChanged.disconnect(this._notify, this);
    this._panel = this._tracker?.currentWidget ?? null;
    this._panel?.sessionContext.kernelChanged.connect(this._notify, this);
    this._panel?.context.pathChanged.connect(this._notify, this);
    this._notify();
  }

  private _notify(): void {
    this._changed.emit();
  }

  private readonly _changed = new Signal<this, void>(this);
  private readonly _new = new Set<string>(); // notebooks that do not name a kernel
  private _panel: NotebookPanel | null = null;
}

/**
 * Wait for the session of a notebook's kernel, which may have just started.
 *
 * @throws SingError - if it has none.
 */
export async function sessionOf(
  model: ISingModel,
  notebook: INotebook,
  trans: TranslationBundle
): Promise<Session> {
  const name = PathExt.basename(notebook.path);
  if (notebook.kernelId === null) {
    throw new SingError(trans.__('%1 has no kernel. Select one first.', name), 'no-kernel');
  }
  const live = () => {
    const found = model.ofKernel(notebook.kernelId);
    return found?.state === 'failed' ? undefined : found;
  };
  const found = live();
  if (found) {
    return found;
  }
  const observing = model.observe();
  let check = () => undefined as void;
  const appeared = new Promise<Session>(resolve => {
    check = () => {
      const session = live();
      if (session) {
        resolve(session);
      }
    };
    model.changed.connect(check);
  });
  try {
    void model.refresh();
    return await within(appeared, SESSION_MS_MAX, () =>
      trans.__(
        'The kernel of %1 has no GPU session, so it cannot restore a checkpoint. Start a Python kernel first.',
        name
      )
    );
  } finally {
    model.changed.disconnect(check);
    observing.dispose();
  }
}

/** Await a promise with a time limit. */
async function within<T>(doing: Promise<T>, ms: number, why: () => string): Promise<T> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new SingError(why(), 'timeout')), ms);
  });
  try {
    return await Promise.race([doing, late]);
  } finally {
    clearTimeout(timer);
  }
}
