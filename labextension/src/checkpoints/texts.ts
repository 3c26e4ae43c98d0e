import { Time } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { SingClient } from '../client';
import type { Checkpoint } from '../tokens';
import { bytesText } from '../words';
import { holdsProcess, isSound, notebookName } from './list';

/** What has come of restoring a checkpoint, as `openapi.yaml` describes it. */
export type Outcome = Awaited<ReturnType<SingClient['restore']>>;

/** A checkpoint's age: `5 minutes ago`. */
export function ageText(checkpoint: Checkpoint): string {
  return checkpoint.created ? Time.formatHuman(checkpoint.created) : '';
}

/** The moment when it was made. */
export function momentText(checkpoint: Checkpoint): string {
  return checkpoint.created ? Time.format(checkpoint.created) : '';
}

/** How many of what: `12 variables and 2 files`. */
export function countsText(variables: number, files: number, trans: TranslationBundle): string {
  const some = trans._n('%1 variable', '%1 variables', variables, variables);
  return files > 0
    ? trans.__('%1 and %2', some, trans._n('%1 file', '%1 files', files, files))
    : some;
}

/** What a checkpoint holds, in a line; of a damaged one what is wrong. */
export function contentsText(checkpoint: Checkpoint, trans: TranslationBundle): string {
  if (!isSound(checkpoint)) {
    return trans.__('Damaged: %1', checkpoint.problem);
  }
  return countsText(checkpoint.saved?.length ?? 0, checkpoint.files ?? 0, trans);
}

/** How many things it lacks; empty if it has all. */
export function leftOutText(checkpoint: Checkpoint, trans: TranslationBundle): string {
  const count = checkpoint.omitted?.length ?? 0;
  return count > 0 ? trans._n('%1 left out', '%1 left out', count, count) : '';
}

/** Who made it. */
export function howText(checkpoint: Checkpoint, trans: TranslationBundle): string {
  return checkpoint.automatic ? trans.__('Automatic') : trans.__('By hand');
}

export function howTitle(checkpoint: Checkpoint, trans: TranslationBundle): string {
  return checkpoint.automatic
    ? trans.__('Made by itself. It is deleted by itself, too, when there are enough newer ones.')
    : trans.__('Somebody asked for it. It is kept until somebody deletes it.');
}

/** In which form a notebook comes back. */
export function formText(checkpoint: Checkpoint, trans: TranslationBundle): string {
  return holdsProcess(checkpoint) ? trans.__('Whole process') : trans.__('Variables');
}

export function formTitle(checkpoint: Checkpoint, trans: TranslationBundle): string {
  return holdsProcess(checkpoint)
    ? trans.__(
        'The kernel goes on in the process that was saved, with its threads and all that cannot be saved by itself; where that does not work, its variables come back.'
      )
    : trans.__('Variables, files, history and random streams come back, in another process.');
}

/** What its sizes mean. */
export function sizeTitle(checkpoint: Checkpoint, trans: TranslationBundle): string {
  return trans.__(
    'Deleting it frees %1. It takes %2 on disk, what it shares with other checkpoints included, and restores %3.',
    bytesText(checkpoint.exclusive ?? 0),
    bytesText(checkpoint.stored ?? 0),
    bytesText(checkpoint.bytes ?? 0)
  );
}

/** How many there are. */
export function totalText(checkpoints: readonly Checkpoint[], trans: TranslationBundle): string {
  const count = checkpoints.length;
  return trans._n('%1 checkpoint', '%1 checkpoints', count, count);
}

/** How many are selected, and what deleting them frees at least: more, if they share something. */
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

/** A checkpoint and where it is from: `before-lunch, 5 minutes ago in train.ipynb`. */
export function labelText(checkpoint: Checkpoint, trans: TranslationBundle): string {
  const name = notebookName(checkpoint);
  return name
    ? trans.__('%1 in %2', ageText(checkpoint), name)
    : ageText(checkpoint) || trans.__('damaged');
}

/** What is asked before one or more are deleted. */
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
        ? trans.__('How much this frees is not known, as not all of it can be read.')
        : count === 1
          ? trans.__('This frees %1.', frees)
          : trans.__('This frees at least %1.', frees),
      trans.__('It cannot be undone.')
    ].join(' ')
  };
}

/** What is to be known before a notebook is replaced. */
export function restoreWarning(where: string, trans: TranslationBundle): string {
  return trans.__(
    'The variables of %1 are replaced, and files that the checkpoint holds are put back: those in the way are set aside.',
    where
  );
}

/** What is to be known of checkpoints that others have made. */
export function trustWarning(trans: TranslationBundle): string {
  return trans.__(
    'This runs the code that the checkpoint holds. Restore only what you have made, or somebody whom you trust.'
  );
}

/** What has come of it, in a sentence or two. */
export function outcomeText(outcome: Outcome, where: string, trans: TranslationBundle): string {
  const counts = countsText(outcome.variables, outcome.files, trans);
  const texts = [
    outcome.form === 'process'
      ? trans.__('%1 goes on in the process of %2, with %3.', where, outcome.checkpoint, counts)
      : trans.__('Restored %1 of %2 into %3.', counts, outcome.checkpoint, where)
  ];
  const lost = outcome.problems.length;
  if (lost > 0) {
    texts.push(trans._n('%1 thing did not come back.', '%1 things did not come back.', lost, lost));
  }
  const aside = Object.keys(outcome.aside).length;
  if (aside > 0) {
    texts.push(trans._n('%1 file was set aside.', '%1 files were set aside.', aside, aside));
  }
  return texts.join(' ');
}

/** That only variables came back, and why. */
export function formOutcomeText(outcome: Outcome, trans: TranslationBundle): string {
  return outcome.why
    ? trans.__('The kernel has the variables, without the process: %1', outcome.why)
    : trans.__('The kernel is the one that was there, with the variables of the checkpoint.');
}

function freed(checkpoints: readonly Checkpoint[]): number {
  return checkpoints.reduce((sum, each) => sum + (each.exclusive ?? 0), 0);
}
