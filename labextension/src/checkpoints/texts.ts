import { Time } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { SingClient } from '../api/client';
import type { Checkpoint } from '../api/tokens';
import { bytesText } from '../text/format';
import { holdsProcess, isSound, notebookName } from './list';

/** The result of restoring a checkpoint, as `openapi.yaml` describes it. */
export type Outcome = Awaited<ReturnType<SingClient['restore']>>;

/** A checkpoint's age: `5 minutes ago`. */
export function ageText(checkpoint: Checkpoint): string {
  return checkpoint.created ? Time.formatHuman(checkpoint.created) : '';
}

/** Time at which it was made. */
export function momentText(checkpoint: Checkpoint): string {
  return checkpoint.created ? Time.format(checkpoint.created) : '';
}

/** Counts, in words: `12 variables and 2 files`. */
export function countsText(variables: number, files: number, trans: TranslationBundle): string {
  const some = trans._n('%1 variable', '%1 variables', variables, variables);
  return files > 0
    ? trans.__('%1 and %2', some, trans._n('%1 file', '%1 files', files, files))
    : some;
}

/** Contents of a checkpoint, in a line; for a damaged one, the problem. */
export function contentsText(checkpoint: Checkpoint, trans: TranslationBundle): string {
  if (!isSound(checkpoint)) {
    return trans.__('Damaged: %1', checkpoint.problem);
  }
  return countsText(checkpoint.saved?.length ?? 0, checkpoint.files ?? 0, trans);
}

/** Number of things that were not saved; empty if there are none. */
export function leftOutText(checkpoint: Checkpoint, trans: TranslationBundle): string {
  const count = checkpoint.omitted?.length ?? 0;
  return count > 0 ? trans._n('%1 not saved', '%1 not saved', count, count) : '';
}

/** Its origin: automatic, or made by the user. */
export function howText(checkpoint: Checkpoint, trans: TranslationBundle): string {
  return checkpoint.automatic ? trans.__('Automatic') : trans.__('You');
}

export function howTitle(checkpoint: Checkpoint, trans: TranslationBundle): string {
  return checkpoint.automatic
    ? trans.__('Created automatically. Deleted automatically when newer ones replace it.')
    : trans.__('Created by you. It is kept until you delete it.');
}

/** Form in which a notebook is restored. */
export function formText(checkpoint: Checkpoint, trans: TranslationBundle): string {
  return holdsProcess(checkpoint) ? trans.__('Whole process') : trans.__('Variables');
}

export function formTitle(checkpoint: Checkpoint, trans: TranslationBundle): string {
  return holdsProcess(checkpoint)
    ? trans.__(
        'Restores the kernel process with its threads. If that fails, restores only its variables.'
      )
    : trans.__(
        'Restores variables, files, history and random number generators into a new process.'
      );
}

/** Explanation of its sizes. */
export function sizeTitle(checkpoint: Checkpoint, trans: TranslationBundle): string {
  return trans.__(
    'Deleting it frees %1. It uses %2 on disk, including data shared with other checkpoints, and restores %3.',
    bytesText(checkpoint.exclusive ?? 0),
    bytesText(checkpoint.stored ?? 0),
    bytesText(checkpoint.bytes ?? 0)
  );
}

/** Number of checkpoints. */
export function totalText(checkpoints: readonly Checkpoint[], trans: TranslationBundle): string {
  const count = checkpoints.length;
  return trans._n('%1 checkpoint', '%1 checkpoints', count, count);
}

/**
 * Number of selected checkpoints, and the minimum that deleting them frees: more, if they share
 * data.
 */
export function selectionText(
  checkpoints: readonly Checkpoint[],
  trans: TranslationBundle
): string {
  return trans.__(
    '%1 selected, deleting frees %2',
    checkpoints.length,
    bytesText(freed(checkpoints))
  );
}

/** A checkpoint and its notebook: `before-lunch, 5 minutes ago in train.ipynb`. */
export function labelText(checkpoint: Checkpoint, trans: TranslationBundle): string {
  const name = notebookName(checkpoint);
  return name
    ? trans.__('%1 in %2', ageText(checkpoint), name)
    : ageText(checkpoint) || trans.__('damaged');
}

/** Question before one or more are deleted. */
export function deletionTexts(
  checkpoints: readonly Checkpoint[],
  trans: TranslationBundle
): { title: string; body: string } {
  const count = checkpoints.length;
  const frees = bytesText(freed(checkpoints));
  const unknown = checkpoints.some(each => each.exclusive === undefined);
  return {
    title:
      count === 1
        ? trans.__('Delete checkpoint %1?', checkpoints[0].name)
        : trans._n('Delete %1 checkpoint?', 'Delete %1 checkpoints?', count, count),
    body: [
      unknown
        ? trans.__('It is damaged, so its size is unknown.')
        : count === 1
          ? trans.__('This frees %1.', frees)
          : trans.__('This frees at least %1.', frees),
      trans.__('This cannot be undone.')
    ].join(' ')
  };
}

/** Warning before a notebook is replaced. */
export function restoreWarning(where: string, trans: TranslationBundle): string {
  return trans.__(
    'This replaces the variables of %1 and restores the files in the checkpoint. Existing files are renamed, not deleted.',
    where
  );
}

/** Warning about checkpoints that other people have made. */
export function trustWarning(trans: TranslationBundle): string {
  return trans.__(
    'A checkpoint contains code that runs when you restore it. Only restore checkpoints made by you or someone you trust.'
  );
}

/** The result of a restore, in a sentence or two. */
export function outcomeText(outcome: Outcome, where: string, trans: TranslationBundle): string {
  const counts = countsText(outcome.variables, outcome.files, trans);
  const texts = [
    outcome.form === 'process'
      ? trans.__('Restored the process of %2 into %1, with %3.', where, outcome.checkpoint, counts)
      : trans.__('Restored %1 from %2 into %3.', counts, outcome.checkpoint, where)
  ];
  const lost = outcome.problems.length;
  if (lost > 0) {
    texts.push(trans._n('%1 not restored.', '%1 not restored.', lost, lost));
  }
  const aside = Object.keys(outcome.aside).length;
  if (aside > 0) {
    texts.push(trans._n('%1 file was renamed.', '%1 files were renamed.', aside, aside));
  }
  return texts.join(' ');
}

/** Explanation that only variables were restored, and why. */
export function formOutcomeText(outcome: Outcome, trans: TranslationBundle): string {
  return outcome.why
    ? trans.__('Only variables were restored, not the process: %1', outcome.why)
    : trans.__('The variables were restored into the running kernel.');
}

function freed(checkpoints: readonly Checkpoint[]): number {
  return checkpoints.reduce((sum, each) => sum + (each.exclusive ?? 0), 0);
}
