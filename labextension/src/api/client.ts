import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import createClient from 'openapi-fetch';
import type { components, paths } from '../openapi';
import type { Checkpoint, Session } from './tokens';

/** An error of the server with a user-facing sentence. */
export class SingError extends Error {
  constructor(
    message: string,
    readonly reason: string
  ) {
    super(message);
    this.name = 'SingError';
  }
}

type Answer<T> = {
  data?: T;
  error?: components['schemas']['Error'];
  response: Response;
};

/**
 * The REST interface of the server extension, with the types of `openapi.yaml`.
 *
 * Each method rejects with a `SingError`.
 */
export class SingClient {
  constructor(settings: ServerConnection.ISettings = ServerConnection.makeSettings()) {
    this._client = createClient<paths>({
      baseUrl: URLExt.join(settings.baseUrl, 'jupyter-sing', 'api'),
      fetch: request => send(request, settings)
    });
  }

  /** All devices and sessions. */
  status() {
    return answered(this._client.GET('/status'));
  }

  /** Activity of each device since a time, in seconds since the epoch. */
  activity(since: number, resolution: number) {
    return answered(this._client.GET('/activity', { params: { query: { since, resolution } } }));
  }

  suspend(id: string): Promise<Session> {
    return answered(this._client.POST('/sessions/{id}/suspend', { params: { path: { id } } }));
  }

  resume(id: string): Promise<Session> {
    return answered(this._client.POST('/sessions/{id}/resume', { params: { path: { id } } }));
  }

  migrate(id: string, device: string): Promise<Session> {
    return answered(
      this._client.POST('/sessions/{id}/migrate', { params: { path: { id } }, body: { device } })
    );
  }

  pin(id: string, pinned: boolean): Promise<Session> {
    const params = { path: { id } };
    return answered(
      pinned
        ? this._client.POST('/sessions/{id}/pin', { params })
        : this._client.POST('/sessions/{id}/unpin', { params })
    );
  }

  /** Save a checkpoint of a session; an empty name lets the daemon choose one. */
  checkpoint(id: string, name = ''): Promise<Checkpoint> {
    return answered(
      this._client.POST('/sessions/{id}/checkpoint', { params: { path: { id } }, body: { name } })
    );
  }

  /** Restore a checkpoint into a session. */
  restore(id: string, name: string) {
    return answered(
      this._client.POST('/sessions/{id}/restore', { params: { path: { id } }, body: { name } })
    );
  }

  checkpoints(): Promise<Checkpoint[]> {
    return answered(this._client.GET('/checkpoints'));
  }

  async deleteCheckpoint(name: string): Promise<void> {
    const { error, response } = await reached(
      this._client.DELETE('/checkpoints/{name}', { params: { path: { name } } })
    );
    if (!response.ok) {
      throw refusal(error, response);
    }
  }

  private readonly _client;
}

/** Send a request as JupyterLab does: with its token, cookies and protection against forgery. */
async function send(request: Request, settings: ServerConnection.ISettings): Promise<Response> {
  const body = request.method === 'GET' ? undefined : (await request.text()) || undefined;
  return ServerConnection.makeRequest(request.url, { method: request.method, body }, settings);
}

async function answered<T>(request: Promise<Answer<T>>): Promise<T> {
  const { data, error, response } = await reached(request);
  if (data === undefined) {
    throw refusal(error, response);
  }
  return data;
}

async function reached<T>(request: Promise<T>): Promise<T> {
  try {
    return await request;
  } catch {
    throw new SingError('The Jupyter server cannot be reached.', 'unreachable');
  }
}

function refusal(error: components['schemas']['Error'] | undefined, response: Response): SingError {
  if (typeof error?.message === 'string') {
    return new SingError(error.message, error.reason);
  }
  const missing = response.status === 404;
  return missing
    ? new SingError('The server has no jupyter_sing extension.', 'missing')
    : new SingError(`The server has answered ${response.status}.`, 'failed');
}
