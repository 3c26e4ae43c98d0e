import type { ISettingRegistry } from '@jupyterlab/settingregistry';
import { Signal } from '@lumino/signaling';
import { expect, test, vi } from 'vitest';
import schema from '../../schema/plugin.json';
import { DEFAULTS, SingSettings } from './settings';

/** A registry with one plugin's settings. */
function registry(composite: object) {
  const changed = new Signal<object, void>({});
  const saved = { composite, changed, set: vi.fn(async () => undefined) };
  return { saved, load: vi.fn(async () => saved) };
}

test('defaults equal those of the schema', () => {
  const described = Object.entries(schema.properties).map(([key, { default: value }]) => [
    key,
    value
  ]);
  expect(DEFAULTS).toEqual(Object.fromEntries(described));
});

test('saved settings apply once they are loaded, and when they change', async () => {
  const known = registry({ ...DEFAULTS, showPill: false });
  const settings = new SingSettings(known as unknown as ISettingRegistry);
  expect(settings.get('showPill')).toBe(true);
  await settings.ready;
  expect(settings.get('showPill')).toBe(false);
  known.saved.composite = { ...DEFAULTS, pollSeconds: 30 };
  known.saved.changed.emit();
  expect(settings.get('showPill')).toBe(true);
  expect(settings.get('pollSeconds')).toBe(30);
});

test('a new setting applies at once, is emitted and is saved', async () => {
  const known = registry(DEFAULTS);
  const settings = new SingSettings(known as unknown as ISettingRegistry);
  await settings.ready;
  const onChanged = vi.fn();
  settings.changed.connect(onChanged);
  const saving = settings.set('confirmSuspend', false);
  expect(settings.get('confirmSuspend')).toBe(false);
  expect(onChanged).toHaveBeenCalledTimes(1);
  await saving;
  expect(known.saved.set).toHaveBeenCalledWith('confirmSuspend', false);
});

test('defaults apply if settings cannot be loaded', async () => {
  const warn = vi.spyOn(console, 'warn').mockImplementation(() => undefined);
  const load = async () => Promise.reject(new Error('No such file.'));
  const settings = new SingSettings({ load } as unknown as ISettingRegistry);
  await settings.ready;
  expect(settings.get('notifications')).toBe(true);
  expect(warn).toHaveBeenCalled();
  expect(new SingSettings(null).get('showPanel')).toBe(true);
});
