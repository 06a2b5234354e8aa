"""What tests of passes share: yours as well as ours."""
