//! Tests of the wire formats from outside: fixtures, mutations and properties.

#[cfg(test)]
mod golden;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod mutations;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod roundtrip;
#[cfg(test)]
mod samples;
