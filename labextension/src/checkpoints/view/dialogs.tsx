import { Dialog, ReactWidget, showDialog } from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';
import React from 'react';
import type { Checkpoint, ISingSettings } from '../../api/tokens';
import { bytesText } from '../../text/format';
import { type INotebook, isOf, isSound } from '../list';
import {
  type Outcome,
  ageText,
  contentsText,
  deletionTexts,
  formOutcomeText,
  labelText,
  outcomeText,
  restoreWarning,
  trustWarning
} from '../texts';

/**
 * Ask for confirmation before a checkpoint is restored, into a new notebook if `notebook` is null.
 */
export async function mayRestore(
  settings: ISingSettings,
  checkpoint: Checkpoint,
  notebook: INotebook | null,
  trans: TranslationBundle
): Promise<boolean> {
  if (!settings.get('confirmRestore')) {
    return true;
  }
  const where = notebook && PathExt.basename(notebook.path);
  const answer = await showDialog({
    title: where
      ? trans.__('Restore %1 into %2?', checkpoint.name, where)
      : trans.__('Restore %1 into a new notebook?', checkpoint.name),
    body: (
      <div className="jp-Sing-question">
        <p className="jp-Sing-questionFacts">
          {trans.__(
            '%1, created %2.',
            contentsText(checkpoint, trans),
            labelText(checkpoint, trans)
          )}
        </p>
        <p>{where ? restoreWarning(where, trans) : newNotebookText(checkpoint, trans)}</p>
        <p>{trustWarning(trans)}</p>
      </div>
    ),
    checkbox: { label: trans.__('Do not ask again'), checked: false },
    buttons: [
      Dialog.cancelButton({ label: trans.__('Cancel') }),
      where
        ? Dialog.warnButton({ label: trans.__('Restore') })
        : Dialog.okButton({ label: trans.__('Restore') })
    ]
  });
  return accepted(answer, settings, 'confirmRestore');
}

/** Ask for confirmation before checkpoints are deleted. */
export async function mayDelete(
  settings: ISingSettings,
  checkpoints: readonly Checkpoint[],
  trans: TranslationBundle
): Promise<boolean> {
  if (!settings.get('confirmDelete')) {
    return true;
  }
  const { title, body } = deletionTexts(checkpoints, trans);
  const answer = await showDialog({
    title,
    body,
    checkbox: { label: trans.__('Do not ask again'), checked: false },
    buttons: [
      Dialog.cancelButton({ label: trans.__('Cancel') }),
      Dialog.warnButton({ label: trans.__('Delete') })
    ]
  });
  return accepted(answer, settings, 'confirmDelete');
}

/** Ask for the checkpoint to restore into a notebook; null: none. */
export async function chooseCheckpoint(
  checkpoints: readonly Checkpoint[],
  notebook: INotebook,
  trans: TranslationBundle
): Promise<string | null> {
  const where = PathExt.basename(notebook.path);
  const sound = checkpoints.filter(isSound);
  const own = sound.filter(each => isOf(each, notebook));
  const others = sound.filter(each => !isOf(each, notebook));
  if (sound.length === 0) {
    await showDialog({
      title: trans.__('No checkpoint to restore'),
      body: trans.__('Run “%sing checkpoint” in a cell to save one.'),
      buttons: [Dialog.okButton({ label: trans.__('Close') })]
    });
    return null;
  }
  const answer = await showDialog({
    title: trans.__('Restore into %1', where),
    body: new Picker(own, others, where, trans),
    focusNodeSelector: 'input:checked',
    buttons: [
      Dialog.cancelButton({ label: trans.__('Cancel') }),
      Dialog.warnButton({ label: trans.__('Restore') })
    ]
  });
  return answer.button.accept ? answer.value : null;
}

/** Show all details of the result of a restore. */
export async function showOutcome(
  outcome: Outcome,
  where: string,
  trans: TranslationBundle
): Promise<void> {
  const aside = Object.entries(outcome.aside);
  await showDialog({
    title: outcome.checkpoint,
    body: (
      <div className="jp-Sing-question jp-Sing-outcome">
        <p className="jp-Sing-questionFacts">{outcomeText(outcome, where, trans)}</p>
        {outcome.form !== 'process' && <p>{formOutcomeText(outcome, trans)}</p>}
        {outcome.problems.length > 0 && (
          <section>
            <h3>{trans.__('Not restored')}</h3>
            <dl>
              {outcome.problems.map((each, index) => (
                <React.Fragment key={index}>
                  <dt>{each.name}</dt>
                  <dd>{each.why}</dd>
                </React.Fragment>
              ))}
            </dl>
          </section>
        )}
        {aside.length > 0 && (
          <section>
            <h3>{trans.__('Existing files that were renamed')}</h3>
            <dl>
              {aside.map(([path, now]) => (
                <React.Fragment key={path}>
                  <dt>{path}</dt>
                  <dd>{trans.__('now %1', now)}</dd>
                </React.Fragment>
              ))}
            </dl>
          </section>
        )}
      </div>
    ),
    buttons: [Dialog.okButton({ label: trans.__('Close') })]
  });
}

/** A list to choose a checkpoint from: those of the notebook first, with its newest selected. */
class Picker extends ReactWidget implements Dialog.IBodyWidget<string | null> {
  constructor(
    private readonly _own: readonly Checkpoint[],
    private readonly _others: readonly Checkpoint[],
    private readonly _where: string,
    private readonly _trans: TranslationBundle
  ) {
    super();
    this.addClass('jp-Sing-question');
    this.addClass('jp-Sing-picker');
    this._chosen = [..._own, ..._others][0].name;
  }

  getValue(): string | null {
    return this._chosen;
  }

  protected render(): React.JSX.Element {
    return (
      <>
        <div className="jp-Sing-pickerList">
          {this._group(this._trans.__('From %1', this._where), this._own)}
          {this._group(this._trans.__('From other notebooks'), this._others)}
        </div>
        <p>{restoreWarning(this._where, this._trans)}</p>
        <p>{trustWarning(this._trans)}</p>
      </>
    );
  }

  private _group(legend: string, checkpoints: readonly Checkpoint[]): React.JSX.Element | null {
    return checkpoints.length === 0 ? null : (
      <fieldset>
        <legend>{legend}</legend>
        {checkpoints.map(each => (
          <label key={each.name} className="jp-Sing-choice">
            <input
              type="radio"
              name="checkpoint"
              value={each.name}
              defaultChecked={each.name === this._chosen}
              onChange={() => (this._chosen = each.name)}
            />
            <span className="jp-Sing-choiceName">{each.name}</span>
            <span className="jp-Sing-choiceFacts">
              {[
                checkpoints === this._own ? ageText(each) : labelText(each, this._trans),
                contentsText(each, this._trans),
                bytesText(each.bytes ?? 0)
              ].join(' · ')}
            </span>
          </label>
        ))}
      </fieldset>
    );
  }

  private _chosen: string;
}

function newNotebookText(checkpoint: Checkpoint, trans: TranslationBundle): string {
  return checkpoint.path
    ? trans.__('This creates a copy of %1 beside it, with a new kernel.', checkpoint.path)
    : trans.__('This creates a new notebook with a new kernel.');
}

async function accepted(
  answer: Dialog.IResult<unknown>,
  settings: ISingSettings,
  key: 'confirmRestore' | 'confirmDelete'
): Promise<boolean> {
  if (answer.button.accept && answer.isChecked) {
    // It takes effect at once; if it cannot be saved, the user is asked again another time.
    await settings.set(key, false).catch(() => undefined);
  }
  return answer.button.accept;
}
