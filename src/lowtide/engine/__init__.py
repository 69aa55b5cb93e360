"""Recording what forward does, and replaying just what backward asks for."""
