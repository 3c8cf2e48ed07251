"""What tests of several files share: schemes, arguments, tiny models, tolerances and hand-made traces."""
