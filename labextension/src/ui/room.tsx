import * as React from 'react';

/**
 * Makes a `jp-SingRoom` as wide as the widest of some texts, so that nothing beside it moves when
 * another of them is shown. Neither seen nor read out.
 */
export function Room(props: { for: readonly string[] }): React.JSX.Element {
  return (
    <>
      {[...new Set(props.for)].map(each => (
        <span key={each} className="jp-SingRoom-text" aria-hidden="true">
          {each}
        </span>
      ))}
    </>
  );
}
