import { nullTranslator } from '@jupyterlab/translation';
import { expect, test } from 'vitest';
import cases from '../testing/units.json';
import { bytesText, durationText, percentText } from './format';

const trans = nullTranslator.load('');

// tests/unit/common/test_units.py checks the same cases in Python.

test.each(cases.bytes as [number, string][])('%d bytes are %s', (count, text) => {
  expect(bytesText(count)).toBe(text);
});

test.each(cases.durations as [number, string][])('%d seconds are %s', (seconds, text) => {
  expect(durationText(seconds, trans)).toBe(text);
});

test.each(cases.percentages as [number, string][])('the part %d is %s', (part, text) => {
  expect(percentText(part, trans)).toBe(text.replace(' ', '\u00a0'));
});
