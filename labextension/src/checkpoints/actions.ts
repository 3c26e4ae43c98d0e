import { Notification } from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { withProgress } from '../model/progress';
import type { Checkpoint, ISing, Session } from '../api/tokens';
import { mayDelete, mayRestore, showOutcome } from './view/dialogs';
import type { INotebook } from './list';
import { type INotebooks, sessionOf } from './notebooks';
import type { CheckpointStore } from './store';
import { type Outcome, outcomeText } from './texts';

/** Time for which a restored notebook's message is shown. */
const OUTCOME_MS = 8000;

/**
 * Actions on checkpoints. Each asks for confirmation, unless the user has disabled that, shows the
 * result, and never rejects.
 */
export class CheckpointActions {
  constructor(
    private readonly _sing: ISing,
    private readonly _store: CheckpointStore,
    private readonly _notebooks: INotebooks,
    private readonly _trans: TranslationBundle
  ) {}

  /** Replace a notebook's variables by those of a checkpoint. */
  async restore(checkpoint: Checkpoint, notebook: INotebook): Promise<void> {
    if (await mayRestore(this._sing.settings, checkpoint, notebook, this._trans)) {
      await this.restoreNow(checkpoint.name, notebook);
    }
  }

  /** Like `restore`, without asking for confirmation. */
  async restoreNow(name: string, notebook: INotebook): Promise<void> {
    const { client, model } = this._sing;
    await this._store.during('restore', name, async () => {
      const session = await this._withProgress(this._session(notebook), {
        doing: this._trans.__('Waiting for the GPU session of %1', PathExt.basename(notebook.path))
      });
      if (session === undefined) {
        return;
      }
      const where = PathExt.basename(notebook.path);
      const outcome = await withProgress(model, session.id, client.restore(session.id, name), {
        doing: this._trans.__('Restoring %1 into %2', name, where),
        done: () => ''
      });
      if (outcome !== undefined) {
        this._report(outcome, where);
      }
    });
  }

  /**
   * Return the session of a notebook; a kernel whose session has failed is restarted to get a new
   * one.
   */
  private async _session(notebook: INotebook): Promise<Session> {
    const { model } = this._sing;
    if (model.ofKernel(notebook.kernelId)?.state === 'failed') {
      await this._notebooks.restart(notebook);
    }
    return sessionOf(model, notebook, this._trans);
  }

  /** Restore a checkpoint into a new notebook, made beside the checkpoint's notebook. */
  async restoreIntoNew(checkpoint: Checkpoint): Promise<void> {
    if (!(await mayRestore(this._sing.settings, checkpoint, null, this._trans))) {
      return;
    }
    const making = async () => {
      const path = await this._notebooks.create(checkpoint);
      return this._notebooks.start(path);
    };
    const notebook = await this._store.during('restore', checkpoint.name, () =>
      this._withProgress(making(), {
        doing: this._trans.__('Creating a notebook for %1', checkpoint.name)
      })
    );
    if (notebook !== undefined) {
      await this.restoreNow(checkpoint.name, notebook);
    }
  }

  /** Delete checkpoints; returns whether any was deleted. */
  async delete(checkpoints: readonly Checkpoint[]): Promise<boolean> {
    if (!(await mayDelete(this._sing.settings, checkpoints, this._trans))) {
      return false;
    }
    const failed = await this._store.delete(checkpoints.map(each => each.name));
    failed.forEach((why, name) =>
      Notification.error(this._trans.__('%1 was not deleted: %2', name, why), { autoClose: false })
    );
    return failed.size < checkpoints.length;
  }

  /** Show progress if the work takes long, and an error if it fails; otherwise show nothing. */
  private _withProgress<T>(doing: Promise<T>, { doing: text }: { doing: string }) {
    return withProgress(this._sing.model, '', doing, { doing: text, done: () => '' });
  }

  private _report(outcome: Outcome, where: string): void {
    const isWhole = outcome.problems.length === 0;
    const details = {
      label: this._trans.__('Details'),
      caption: this._trans.__('What was restored, and what was not'),
      callback: () => void showOutcome(outcome, where, this._trans)
    };
    Notification.emit(outcomeText(outcome, where, this._trans), isWhole ? 'success' : 'warning', {
      autoClose: isWhole ? OUTCOME_MS : false,
      actions: hasDetails(outcome) ? [details] : []
    });
  }
}

/** True if the outcome needs more than a sentence. */
function hasDetails(outcome: Outcome): boolean {
  return !!outcome.why || outcome.problems.length > 0 || Object.keys(outcome.aside).length > 0;
}
