import type { TranslationBundle } from '@jupyterlab/translation';
import React, { useLayoutEffect, useRef } from 'react';
import { type HeldState, RANKS } from '../../api/states';
import { durationText } from '../../text/format';
import { sessionName, stateWord } from '../../text/words';
import { drawSwatch, paint } from './chart';
import { kindIcons } from './icons';
import type { IUse, Kind } from '../data/data';
import { KINDS, type SessionStyles } from '../data/layout';
import { kindWord } from '../data/text';
import type { ITheme } from './theme';

const STATES = Object.keys(RANKS) as HeldState[];
const SWATCH = { width: 22, height: 12 };

/** Legend: sessions, and the meaning of patterns and icons. */
export const Legend = React.memo(function Legend(props: {
  uses: readonly IUse[];
  kinds: ReadonlySet<Kind>;
  styles: SessionStyles;
  theme: ITheme;
  highlighted: string | null;
  pinned: string | null;
  onHighlight: (session: string | null) => void;
  onPin: (session: string | null) => void;
  trans: TranslationBundle;
}): React.ReactElement {
  const { uses, kinds, styles, theme, pinned, trans } = props;
  return (
    <div className="jp-SingActivity-legend">
      <div
        className="jp-SingActivity-sessions"
        role="group"
        aria-label={trans.__(
          'Sessions of the last 24 hours, longest running time first. Select one to highlight it.'
        )}
      >
        {uses.map(use => {
          const { session } = use;
          const isPinned = pinned === session;
          return (
            <button
              key={session}
              type="button"
              aria-pressed={isPinned}
              className={classOf(use, props.highlighted)}
              title={trans.__(
                '%1: ran for %2, held a GPU for %3',
                sessionName(use, trans),
                durationText(use.running, trans),
                durationText(use.held, trans)
              )}
              onPointerEnter={() => props.onHighlight(session)}
              onPointerLeave={() => props.onHighlight(null)}
              onClick={() => props.onPin(isPinned ? null : session)}
            >
              <Swatch theme={theme} styles={styles} session={session} state="running" />
              <strong>{sessionName(use, trans)}</strong>
              {use.name && use.owner && <span className="jp-SingActivity-owner">{use.owner}</span>}
              <span className="jp-SingActivity-seconds">
                {use.running > 0 ? durationText(use.running, trans) : '–'}
              </span>
            </button>
          );
        })}
      </div>
      <div className="jp-SingActivity-key">
        {STATES.map(state => (
          <span key={state}>
            <Swatch theme={theme} state={state} />
            {stateWord({ state }, trans)}
          </span>
        ))}
        {kinds.size > 0 && <span className="jp-SingActivity-separator" />}
        {KINDS.filter(kind => kinds.has(kind))
          .reverse()
          .map(kind => {
            const icon = kindIcons[kind];
            return (
              <span key={kind} className={`jp-SingActivity-kind jp-mod-${kind}`}>
                <icon.react tag="span" className="jp-SingActivity-icon" />
                {kindWord(kind, trans)}
              </span>
            );
          })}
      </div>
    </div>
  );
});

function classOf({ session, held }: IUse, highlighted: string | null): string {
  const active = highlighted === session ? ' jp-mod-active' : '';
  return `jp-SingActivity-session${active}${held > 0 ? '' : ' jp-mod-absent'}`;
}

function Swatch(props: {
  theme: ITheme;
  state: HeldState;
  styles?: SessionStyles;
  session?: string;
}): React.ReactElement {
  const { theme, state, styles, session } = props;
  const canvas = useRef<HTMLCanvasElement>(null);
  useLayoutEffect(() => {
    const style = session === undefined ? null : (styles?.of(session) ?? null);
    paint(canvas.current!, SWATCH.width, SWATCH.height, context =>
      drawSwatch(context, theme, state, style, SWATCH)
    );
  }, [theme, state, styles, session]);
  return <canvas ref={canvas} style={SWATCH} aria-hidden="true" />;
}
