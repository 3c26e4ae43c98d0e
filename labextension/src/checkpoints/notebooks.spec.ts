import type { NotebookPanel } from '@jupyterlab/notebook';
import type { ServiceManager } from '@jupyterlab/services';
import { nullTranslator } from '@jupyterlab/translation';
import { beforeEach, expect, test, vi } from 'vitest';
import { aCheckpoint } from '../testing/checkpoints';
import { Notebooks } from './notebooks';

let copy: ReturnType<typeof vi.fn>;
let newUntitled: ReturnType<typeof vi.fn>;
let open: ReturnType<typeof vi.fn>;
let kernel: object | null;
let notebooks: Notebooks;

beforeEach(() => {
  copy = vi.fn(async (path: string) => ({ path: path.replace('.ipynb', '-Copy1.ipynb') }));
  newUntitled = vi.fn(async ({ path }: { path: string }) => ({
    path: path ? `${path}/Untitled.ipynb` : 'Untitled.ipynb'
  }));
  kernel = { id: 'kernel-2', info: Promise.resolve({}) };
  open = vi.fn(async (path: string) => ({
    context: { path, ready: Promise.resolve() },
    sessionContext: { ready: Promise.resolve(), session: kernel && { kernel } }
  }));
  notebooks = new Notebooks(
    null,
    {
      contents: { copy, newUntitled, localPath: (path: string) => path },
      kernelspecs: { specs: { default: 'python3' } }
    } as unknown as ServiceManager.IManager,
    open as unknown as (path: string, kernel: string | null) => Promise<NotebookPanel>,
    nullTranslator.load('')
  );
});

test('a new notebook is a copy of the one that was saved, beside it', async () => {
  expect(await notebooks.create(aCheckpoint())).toBe('lessons/train-Copy1.ipynb');
  expect(copy).toHaveBeenCalledWith('lessons/train.ipynb', 'lessons');
  expect(await notebooks.start('lessons/train-Copy1.ipynb')).toEqual({
    path: 'lessons/train-Copy1.ipynb',
    kernelId: 'kernel-2'
  });
  expect(open).toHaveBeenCalledWith('lessons/train-Copy1.ipynb', null); // it knows its kernel
});

test('without the saved notebook, the new one is empty with a default kernel', async () => {
  copy.mockRejectedValueOnce(new Error('No such file.'));
  const path = await notebooks.create(aCheckpoint());
  expect(path).toBe('lessons/Untitled.ipynb');
  await notebooks.start(path);
  expect(open).toHaveBeenCalledWith(path, 'python3');
});

test('without its directory, the new notebook is created at the top', async () => {
  copy.mockRejectedValueOnce(new Error('No such file.'));
  newUntitled.mockRejectedValueOnce(new Error('No such directory.'));
  expect(await notebooks.create(aCheckpoint())).toBe('Untitled.ipynb');
  expect(await notebooks.create(aCheckpoint({ path: '' }))).toBe('Untitled.ipynb');
  expect(copy).toHaveBeenCalledTimes(1);
});

test('a notebook without a kernel is an error, and an unresponsive kernel times out', async () => {
  kernel = null;
  expect((await notebooks.start('a.ipynb')).kernelId).toBeNull();
  vi.useFakeTimers();
  kernel = { id: 'kernel-2', info: new Promise(() => undefined) };
  const starting = expect(notebooks.start('a.ipynb')).rejects.toThrow(
    'The kernel of a.ipynb does not respond. Restart it, then try again.'
  );
  await vi.advanceTimersByTimeAsync(600_000);
  await starting;
  vi.useRealTimers();
});
