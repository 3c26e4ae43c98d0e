import type { TranslationBundle } from '@jupyterlab/translation';
import React from 'react';
import type { Checkpoint } from '../../api/tokens';
import { bytesText } from '../../text/format';
import { deviceName } from '../../text/words';
import { isSound } from '../list';
import { formTitle, howTitle, momentText, sizeTitle } from '../texts';

/** Maximum number of variables shown; the largest come first. */
const VARIABLES_MAX = 200;

type Omission = NonNullable<Checkpoint['omitted']>[number];

interface IDetails {
  readonly checkpoint: Checkpoint;
  readonly openNotebook: (path: string) => void;
  readonly trans: TranslationBundle;
}

/** Contents of a checkpoint, what it lacks, and its origin. */
export function Details(details: IDetails): React.JSX.Element {
  const { checkpoint, trans } = details;
  if (!isSound(checkpoint)) {
    return (
      <div className="jp-Sing-details">
        <p>
          {trans.__('This checkpoint is damaged and cannot be restored:')} {checkpoint.problem}
        </p>
        <p>{trans.__('Delete it to free its space.')}</p>
      </div>
    );
  }
  return (
    <div className="jp-Sing-details">
      <Variables {...details} />
      <div>
        <Omissions
          title={trans.__('Not saved')}
          omissions={checkpoint.omitted ?? []}
          trans={trans}
        />
        <Omissions
          title={trans.__('Saved only with the process')}
          omissions={checkpoint.only_process ?? []}
          trans={trans}
        />
        <Facts {...details} />
      </div>
    </div>
  );
}

function Variables({ checkpoint, trans }: IDetails): React.JSX.Element {
  const saved = [...(checkpoint.saved ?? [])].sort((a, b) => (b.bytes ?? 0) - (a.bytes ?? 0));
  const more = saved.length - VARIABLES_MAX;
  return (
    <section>
      <h3>{trans.__('Variables')}</h3>
      {saved.length === 0 && <p>{trans.__('None.')}</p>}
      <div className="jp-Sing-variables">
        {/* Table rows inside a table row: a list, for screen readers. */}
        <ul>
          {saved.slice(0, VARIABLES_MAX).map(each => (
            <li key={each.name}>
              <code title={each.name}>{each.name}</code>
              <span title={each.kind}>{each.kind}</span>
              <span>{bytesText(each.bytes ?? 0)}</span>
            </li>
          ))}
        </ul>
      </div>
      {more > 0 && <p>{trans._n('and %1 more', 'and %1 more', more, more)}</p>}
    </section>
  );
}

function Omissions({
  title,
  omissions,
  trans
}: {
  readonly title: string;
  readonly omissions: readonly Omission[];
  readonly trans: TranslationBundle;
}): React.JSX.Element | null {
  return omissions.length === 0 ? null : (
    <section>
      <h3>{title}</h3>
      <dl>
        {omissions.map((each, index) => (
          <React.Fragment key={index}>
            <dt>
              <code>{each.name}</code>
              {each.partly && <> {trans.__('(in part)')}</>}
            </dt>
            <dd>{each.why}</dd>
          </React.Fragment>
        ))}
      </dl>
    </section>
  );
}

function Facts({ checkpoint, openNotebook, trans }: IDetails): React.JSX.Element {
  const { path, notebook, session, torch, device } = checkpoint;
  const facts: [string, React.ReactNode][] = [
    [
      trans.__('Notebook'),
      path ? (
        <button className="jp-Sing-link" onClick={() => openNotebook(path)}>
          {path}
        </button>
      ) : (
        notebook || session
      )
    ],
    [trans.__('Created'), `${momentText(checkpoint)}. ${howTitle(checkpoint, trans)}`],
    [trans.__('Restores'), formTitle(checkpoint, trans)],
    [
      trans.__('Files'),
      checkpoint.files
        ? trans._n('%1 changed file', '%1 changed files', checkpoint.files, checkpoint.files)
        : trans.__('none')
    ],
    [
      trans.__('GPU'),
      torch ? trans.__('%1, torch %2', deviceName(device ?? ''), torch) : trans.__('none')
    ],
    [trans.__('Size'), sizeTitle(checkpoint, trans)]
  ];
  return (
    <section>
      <h3>{trans.__('Details')}</h3>
      <dl>
        {facts.map(([term, value]) => (
          <React.Fragment key={term}>
            <dt>{term}</dt>
            <dd>{value}</dd>
          </React.Fragment>
        ))}
      </dl>
    </section>
  );
}
