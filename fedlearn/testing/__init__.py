"""For the tests of applications that embed the client: a coordinator of their own."""
