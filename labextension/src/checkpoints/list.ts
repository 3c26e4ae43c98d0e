import type { Checkpoint } from '../api/tokens';

/** A notebook that is open, and its kernel. */
export interface INotebook {
  /** Path relative to the server's root. */
  readonly path: string;
  readonly kernelId: string | null;
}

/** Keys by which the list can be sorted. */
export type SortKey = 'name' | 'notebook' | 'created' | 'how' | 'form' | 'size';

export interface IOrder {
  readonly key: SortKey;
  readonly descending: boolean;
}

/** Filter of the list: entries with all words, and of one notebook if it is given. */
export interface IFilter {
  readonly text: string;
  readonly of: INotebook | null;
}

/** Newest first, as the server lists them. */
export const NEWEST_FIRST: IOrder = { key: 'created', descending: true };

/**
 * True if a checkpoint belongs to a notebook: to its kernel, which keeps its id, or to its path.
 */
export function isOf(checkpoint: Checkpoint, notebook: INotebook): boolean {
  return (
    (!!checkpoint.kernel_id && checkpoint.kernel_id === notebook.kernelId) ||
    (!!checkpoint.path && checkpoint.path === notebook.path)
  );
}

/** True if the checkpoint is readable as a whole. */
export function isSound(checkpoint: Checkpoint): boolean {
  return checkpoint.problem === undefined;
}

/** True if it holds the process of its notebook, and not only variables. */
export function holdsProcess(checkpoint: Checkpoint): boolean {
  return checkpoint.forms?.includes('process') ?? false;
}

/** The name of the notebook from which it was made, without directories. */
export function notebookName(checkpoint: Checkpoint): string {
  const path = checkpoint.path || checkpoint.notebook || checkpoint.session || '';
  return path.split('/').pop() ?? '';
}

/**
 * Return the checkpoints that match a filter, sorted. Entries without a value come last in any
 * order.
 */
export function arranged(
  checkpoints: readonly Checkpoint[],
  filter: IFilter,
  order: IOrder
): Checkpoint[] {
  const words = filter.text.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = checkpoints.filter(
    each => (filter.of === null || isOf(each, filter.of)) && hasWords(each, words)
  );
  const sign = order.descending ? -1 : 1;
  return chosen.sort(
    (a, b) => compared(KEYS[order.key](a), KEYS[order.key](b), sign) || compared(a.name, b.name, 1)
  );
}

/** Return the order after a click on a column: reversed, or the column's usual first order. */
export function clicked(order: IOrder, key: SortKey): IOrder {
  return order.key === key
    ? { key, descending: !order.descending }
    : { key, descending: key === 'created' || key === 'size' };
}

const KEYS: Record<SortKey, (checkpoint: Checkpoint) => string | number | undefined> = {
  name: each => each.name,
  notebook: each => notebookName(each) || undefined,
  created: each => (each.created ? Date.parse(each.created) : undefined),
  how: each => (isSound(each) ? Number(each.automatic) : undefined),
  form: each => (isSound(each) ? Number(holdsProcess(each)) : undefined),
  size: each => each.exclusive
};

function compared<T extends string | number>(
  a: T | undefined,
  b: T | undefined,
  sign: number
): number {
  if (a === undefined || b === undefined) {
    return Number(a === undefined) - Number(b === undefined);
  }
  return typeof a === 'string' && typeof b === 'string'
    ? sign * a.localeCompare(b, undefined, { numeric: true })
    : sign * (Number(a) - Number(b));
}

/** True if each word is in its name, its notebook's path, or the name of a variable. */
function hasWords(checkpoint: Checkpoint, words: readonly string[]): boolean {
  const texts = [
    checkpoint.name,
    checkpoint.path,
    checkpoint.notebook ?? '',
    checkpoint.session ?? '',
    ...(checkpoint.saved ?? []).map(each => each.name ?? '')
  ].map(each => each.toLowerCase());
  return words.every(word => texts.some(text => text.includes(word)));
}
