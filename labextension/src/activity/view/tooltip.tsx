import type { TranslationBundle } from '@jupyterlab/translation';
import React, { useLayoutEffect, useRef } from 'react';
import { stateIcons } from '../../ui/icons';
import { durationText } from '../../text/format';
import { readable, sessionName } from '../../text/words';
import { kindIcons } from './icons';
import type { ActivityEvent, Span } from '../data/data';
import { type Clock, kindWord, spanFacts } from '../data/text';

/** What is pointed at. */
export type Pointed =
  | { type: 'spans'; spans: readonly Span[] }
  | { type: 'events'; events: readonly ActivityEvent[] }
  | { type: 'value'; text: string; at: number };

/** Above this number of lines, only the number is shown. */
const LINES_MAX = 5;

/** Describes the item that is pointed at, beside it and within the chart. */
export function Tooltip(props: {
  pointed: Pointed;
  x: number;
  y: number;
  until: number;
  now: number;
  clock: Clock;
  trans: TranslationBundle;
}): React.ReactElement {
  const { pointed, x, y, until, now, clock, trans } = props;
  const node = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const { offsetWidth, offsetHeight, parentElement, style } = node.current!;
    const room = parentElement!;
    const left = x + 14 + offsetWidth > room.clientWidth ? x - 14 - offsetWidth : x + 14;
    const top = y + 18 + offsetHeight > room.clientHeight ? y - 12 - offsetHeight : y + 18;
    style.transform = `translate(${Math.max(left, 4)}px, ${Math.max(top, 4)}px)`;
  });
  return (
    <div className="jp-SingActivity-tip" role="tooltip" ref={node}>
      {pointed.type === 'value' && (
        <div>
          <strong>{pointed.text}</strong> <span>{clock.exact(pointed.at)}</span>
        </div>
      )}
      {pointed.type === 'spans' && spansTip(pointed.spans, until, now, clock, trans)}
      {pointed.type === 'events' &&
        pointed.events.slice(0, LINES_MAX).map((event, index) => {
          const icon = kindIcons[event.kind];
          return (
            <div key={index}>
              <div className="jp-SingActivity-tipTitle">
                <icon.react tag="span" className="jp-SingActivity-icon" />
                <strong>{kindWord(event.kind, trans)}</strong>
                <span>{sessionName(event, trans)}</span>
                {event.name && event.owner && (
                  <span className="jp-SingActivity-owner">{event.owner}</span>
                )}
                <time>{clock.exact(event.at)}</time>
              </div>
              <div>{readable(event.text)}</div>
            </div>
          );
        })}
      {pointed.type === 'events' && more(pointed.events.length, trans)}
    </div>
  );
}

function spansTip(
  spans: readonly Span[],
  until: number,
  now: number,
  clock: Clock,
  trans: TranslationBundle
): React.ReactNode {
  if (spans.length === 1) {
    const span = spans[0];
    const facts = spanFacts(span, until, now, clock, trans);
    const icon = stateIcons[span.state];
    return (
      <>
        <div className="jp-SingActivity-tipTitle">
          <strong>{facts.name}</strong>
          {facts.owner && <span className="jp-SingActivity-owner">{facts.owner}</span>}
        </div>
        <div className="jp-SingActivity-tipTitle">
          <icon.react tag="span" className="jp-SingActivity-icon" />
          <span>{facts.state}</span>
          <span>{facts.duration}</span>
        </div>
        <time>{facts.time}</time>
      </>
    );
  }
  return (
    <>
      {spans.slice(0, LINES_MAX).map((span, index) => {
        const icon = stateIcons[span.state];
        return (
          <div key={index} className="jp-SingActivity-tipTitle">
            <icon.react tag="span" className="jp-SingActivity-icon" />
            <strong>{sessionName(span, trans)}</strong>
            <span>{durationText(span.end - span.start, trans)}</span>
            <time>{clock.exact(span.start)}</time>
          </div>
        );
      })}
      {more(spans.length, trans)}
    </>
  );
}

function more(count: number, trans: TranslationBundle): React.ReactNode {
  const hidden = count - LINES_MAX;
  return (
    hidden > 0 && (
      <em>
        {trans._n('%1 more here. Zoom in to see it.', '%1 more here. Zoom in to see them.', hidden)}
      </em>
    )
  );
}
