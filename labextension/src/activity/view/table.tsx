import type { TranslationBundle } from '@jupyterlab/translation';
import React from 'react';
import { stateIcons } from '../../ui/icons';
import { durationText, percentText } from '../../text/format';
import { deviceName, sessionName } from '../../text/words';
import { kindIcons } from './icons';
import { type Activity, busySeconds, endOf, greatest } from '../data/data';
import { itemsOf } from '../data/layout';
import type { IRange } from '../data/range';
import { type Clock, itemFacts, memoryText } from '../data/text';

/** More rows than this are slow to draw, and too many to read. */
const ROWS_MAX = 400;

/** Table of the spans and events within a time, newest first. */
export function ActivityTable(props: {
  record: Activity;
  range: IRange;
  now: number;
  clock: Clock;
  trans: TranslationBundle;
}): React.ReactElement {
  const { record, range, now, clock, trans } = props;
  const { start, end } = range;
  const last = Math.min(end, now);
  const seconds = Math.max(last - start, 1);
  const rows = record.devices
    .flatMap(({ id, held }) => itemsOf(held, record.events, id).map(item => ({ id, item })))
    .filter(
      ({ item }) =>
        item.start <= end &&
        (item.type === 'span' ? endOf(item.span, record.until, now) : item.start) >= start
    )
    .sort((one, other) => other.item.start - one.item.start);
  const shown = rows.slice(0, ROWS_MAX);
  return (
    <div className="jp-SingActivity-tables" tabIndex={0}>
      <table className="jp-SingActivity-table">
        <caption>{trans.__('GPUs, %1', clock.range({ start, end: last }))}</caption>
        <thead>
          <tr>
            <th scope="col">{trans.__('GPU')}</th>
            <th scope="col">{trans.__('In use')}</th>
            <th scope="col">{trans.__('Peak memory')}</th>
            <th scope="col">{trans.__('Longest queue')}</th>
          </tr>
        </thead>
        <tbody>
          {record.devices.map(({ id, held, memory, memory_total, queue }) => (
            <tr key={id}>
              <th scope="row">{deviceName(id)}</th>
              <td>
                {percentText(busySeconds(held, start, last, record.until, now) / seconds, trans)}
              </td>
              <td>{memoryText(greatest(memory, start, last), memory_total)}</td>
              <td>{greatest(queue, start, last)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <table className="jp-SingActivity-table">
        <caption>
          {rows.length > shown.length
            ? trans.__(
                'Showing the newest %1 of %2 entries. Zoom in or go back in time to see the others.',
                shown.length,
                rows.length
              )
            : trans._n('%1 entry, newest first', '%1 entries, newest first', rows.length)}
        </caption>
        <thead>
          <tr>
            <th scope="col">{trans.__('From')}</th>
            <th scope="col">{trans.__('To')}</th>
            <th scope="col">{trans.__('Duration')}</th>
            <th scope="col">{trans.__('GPU')}</th>
            <th scope="col">{trans.__('State')}</th>
            <th scope="col">{trans.__('Session')}</th>
            <th scope="col">{trans.__('Owner')}</th>
          </tr>
        </thead>
        <tbody>
          {shown.map(({ id, item }, index) => {
            const isSpan = item.type === 'span';
            const who = isSpan ? item.span : item.event;
            const icon = isSpan ? stateIcons[item.span.state] : kindIcons[item.event.kind];
            const until = isSpan ? endOf(item.span, record.until, now) : item.start;
            const { word, text } = itemFacts(item, trans);
            return (
              <tr key={index} className={isSpan ? undefined : 'jp-mod-event'}>
                <td>{clock.full(item.start)}</td>
                <td>{!isSpan ? '' : until >= now ? trans.__('now') : clock.full(until)}</td>
                <td>{isSpan ? durationText(until - item.start, trans) : ''}</td>
                <td>{deviceName(id)}</td>
                <td title={text}>
                  <icon.react tag="span" className="jp-SingActivity-icon" /> {word}
                  {text && <span className="jp-SingActivity-said">{text}</span>}
                </td>
                <td>{sessionName(who, trans)}</td>
                <td>{who.owner}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}
